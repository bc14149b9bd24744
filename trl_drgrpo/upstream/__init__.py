"""The only place that names the privates of TRL and transformers.

Reading order: `versions.py` (the supported range), `seams.py` (the table of what is relied on, and its check),
`hooks.py` (what features are handed), `host.py` (`GRPOTrainer` with hooks), `weight_sync.py` (adapters to vLLM),
`quiet.py` (notices that nobody can act on).
"""
