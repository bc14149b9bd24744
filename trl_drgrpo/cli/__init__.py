"""The command line `trl-drgrpo`. `main.py` dispatches; `console.py` prints, one line per error.

A run's way: `flags.py` (which keys there are, read from source without importing TRL; those of this package are in
`script_arguments.py` and in `config/`) -> `recipe.py` (recipe and flags to typed values, with file and line) ->
`job.py` (dataclasses, rewards, data of `data.py`, trainer, and what is said of them), called by `train.py`. The other
commands take a model, its run and keys of `train` by `run_keys.py`; those that take many rows through a model read
them, go on where they stopped and write by `batch.py`.
"""
