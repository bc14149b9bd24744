"""The objective of Dr. GRPO as pure tensor functions: rewards -> advantages -> loss.

Reading order: `advantages.py` (outcome rewards), `step_advantages.py` (step rewards), `value_baseline.py` (step scores
as a baseline), `group_selection.py` (which groups of a batch are trained on), `loss.py`. Only torch and numpy are
imported: no TRL, no transformers. `trainer.py` hands what these functions give to TRL's loss.
"""
