"""The command line `trl-drgrpo`. `main.py` dispatches; every other public module is one subcommand.

`train` is spread over `flags.py` (which keys exist, read from source without importing TRL; those of this package are
in `script_arguments.py` and in `config/`), `recipe.py` (YAML, flags over it), `values.py` (text to typed value),
`data.py` (datasets and prompts), `job.py` (dataclasses, rewards, data, trainer) and `resolved.py` (what a run prints).
`eval` and `generate` take `train`'s keys by `run_keys.py`, from flags or from the recipe that a run keeps. `eval`,
`search` and `label-steps` read their prompts, go on where they stopped and write by `batch.py`; `score` writes by it.
"""
