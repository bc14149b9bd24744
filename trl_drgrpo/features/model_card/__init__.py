"""What a run leaves for others: the model card, the upload, and no secret in either."""
