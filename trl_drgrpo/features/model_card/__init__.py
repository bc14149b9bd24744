"""The model card and the upload, without secrets."""
