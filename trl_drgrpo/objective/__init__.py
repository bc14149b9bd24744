"""The objective of Dr. GRPO as pure tensor functions: rewards -> advantages -> loss.

Reading order: `advantages.py` (outcome rewards, and the groups that are trained on), `step_advantages.py` (step
rewards), `value_baseline.py` (step scores as a baseline), `fork_advantages.py`, `loss.py`. Only torch and numpy are
imported: no TRL, no transformers. `trainer.py` hands what these functions give to TRL's loss.
"""
