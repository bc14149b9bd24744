"""Rewards that score: `mathematics`, `code`, `strings`, `judge` (a model) and `reasoning_gym`."""
