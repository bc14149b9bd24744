"""The command line `trl-drgrpo`. `main.py` dispatches; every other public module is one subcommand.

`train` is spread over `flags.py` (which keys exist, read from source without importing TRL), `recipe.py` (YAML),
`values.py` (text to typed value), `job.py` (dataclasses, rewards, data, trainer) and `resolved.py` (what `--dry_run`
prints), `closing.py` (its last lines). `eval` and `generate` take `train`'s keys by `run_keys.py`, from flags or from
the recipe that a run keeps (`kept_recipe.py`).
"""
