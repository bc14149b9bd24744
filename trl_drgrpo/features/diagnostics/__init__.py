"""Metrics, run log and warnings of a run: pure functions over a generation batch, and detectors that warn."""
