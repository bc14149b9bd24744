"""Metrics of a window, weighted by its tokens and rows."""

import pytest

from trl_drgrpo.features.fast_path.window import WindowMetrics

# Metrics


def test_metrics_are_weighted_by_tokens_and_cover_what_was_left_out():
    metrics = WindowMetrics(clips_rows=False)
    metrics.add({"rows": 4, "loss_tokens": 30}, {"clip_ratio/low_mean": [0.1], "entropy": [2.0]}, ranks=1)
    metrics.add(
        {"rows": 2, "loss_tokens": 10},
        {"clip_ratio/low_mean": [0.5], "entropy": [4.0], "clip_ratio/low_min": [0.2], "clip_ratio/high_max": [0.3]},
        ranks=1,
    )
    # 30 * 0.1 + 10 * 0.5 = 8 clipped tokens of 80; entropy (30 * 2 + 10 * 4) / 40 over the rows that were run
    assert metrics.finish({"rows": 16, "loss_tokens": 80, "leaves_out": True}) == {
        "clip_ratio/low_mean": [pytest.approx(0.1)],
        "entropy": [pytest.approx(2.5)],
        "clip_ratio/low_min": [0.0],
        "clip_ratio/high_max": [0.3],
    }
    assert metrics.finish({"rows": 16, "loss_tokens": 80, "leaves_out": True}) == {}


def test_metrics_of_sequence_ratios_count_rows():
    metrics = WindowMetrics(clips_rows=True)
    metrics.add({"rows": 4, "loss_tokens": 30}, {"clip_ratio/low_mean": [0.25]}, ranks=2)  # 2 of 8 rows
    assert metrics.finish({"rows": 16, "loss_tokens": 80, "leaves_out": True}) == {"clip_ratio/low_mean": [0.125]}


def test_fillers_add_nothing():
    metrics = WindowMetrics(clips_rows=False)
    nothing = {"entropy": [0.0], "clip_ratio/low_mean": [0.0], "clip_ratio/low_min": [float("nan")]}
    metrics.add({"rows": 1, "loss_tokens": 0}, nothing, ranks=1)
    assert metrics.finish({"rows": 8, "loss_tokens": 0, "leaves_out": True}) == {"clip_ratio/low_mean": [0.0]}
