"""Metrics from saved completions, computed by hand."""

import pytest

from trl_drgrpo.report.plain_trl import batch_metrics
from trl_drgrpo.report.records import Group, Row, Span, finish_group


def test_derived_metrics_by_hand():
    def group(rewards, lengths):
        rows = [Row([Span("x")], reward=r, length=n) for r, n in zip(rewards, lengths, strict=True)]
        return finish_group(Group(1, "train", 0, "p", rows))

    metrics = batch_metrics(
        [group([1, 0, 0, 0], [2, 4, 4, 4]), group([1, 1, 0, 0], [1, 1, 1, 1]), group([0] * 4, [5] * 4)]
    )
    assert metrics["drgrpo/pass_rate"] == 3 / 12
    assert metrics["drgrpo/all_incorrect_frac"] == 1 / 3
    assert metrics["completions/length_correct_mean"] == 4 / 3
    assert metrics["completions/length_incorrect_mean"] == pytest.approx((12 + 2 + 20) / 9)
    assert metrics["difficulty/groups_frac/0-25"] == metrics["difficulty/groups_frac/25-50"] == 1 / 3
    # Dr. GRPO: .75 * 2 + 3 * .25 * 4 = 4.5 and 4 * .5 = 2; the dead group adds nothing
    assert metrics["difficulty/gradient_weight_frac/0-25"] == pytest.approx(4.5 / 6.5)
    # GRPO: sum |z| = 1.5 / .5 = 3 and 2 / .57735 = 3.4641 (+ 1e-4 on the std), whatever the lengths
    assert metrics["difficulty/gradient_weight_frac_grpo/0-25"] == pytest.approx(3 / 6.4641, abs=1e-4)
