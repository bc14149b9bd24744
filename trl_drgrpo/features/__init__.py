"""Plug-ins of the trainer's hooks.

A feature is an object with hooks (see `upstream/hooks.py`), as a transformers callback is: it owns its state, reads
`trainer.args` and never imports the configuration.
"""
