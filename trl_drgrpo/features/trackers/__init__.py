"""Sends recorded groups (a table) and key curves (a picture) to trackers."""
