"""The only place that names the privates of TRL and transformers.

Reading order: `versions.py` (the supported range, notices that nobody can act on), `seams.py` (the table of what is
relied on, and its check), `hooks.py` (what features may define, and how a hook finds them), `batches.py` (what they
are handed), `private_state.py` and `trl_overrides.py` (`GRPOTrainer` with public state and hooks), `environments.py`
(turns), `description.py` (what only describes a run never ends it), `vllm_adapters.py` (what vLLM is sent),
`weight_sync.py` (adapters merged layer by layer, what vLLM cannot be sent), `checkpoint_weights.py` (their names).
"""
