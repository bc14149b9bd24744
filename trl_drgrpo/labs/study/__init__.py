"""The two biases of GRPO measured: what Dr. GRPO is for, as experiments that anyone can repeat."""
