"""Experiments that measure the two biases of GRPO that Dr. GRPO removes; anyone can repeat them."""
