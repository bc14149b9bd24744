"""What trackers get beside the metrics: the recorded groups as a table, the key curves as a picture."""
