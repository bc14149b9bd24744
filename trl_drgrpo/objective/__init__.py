"""The objective of Dr. GRPO as pure tensor functions: rewards -> advantages -> loss.

Reading order: `advantages.py` (outcome rewards), `step_advantages.py` (step rewards), `loss.py`. Only torch is
imported: no TRL, no transformers. `trainer.py` hands what these functions give to TRL's loss.
"""
