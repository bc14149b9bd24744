"""The two divisors, drawn."""

import pytest

from trl_drgrpo.labs.study.divisor_figure import draw_divisors

pytest.importorskip("matplotlib")


def test_the_curves_are_the_biases():
    by_length, by_group = draw_divisors(num_generations=8).axes
    lines = {line.get_label(): line.get_ydata() for line in by_length.get_lines()}
    assert lines["grpo"][0] / lines["grpo"][-1] == pytest.approx(100)  # 10 and 1000 tokens
    assert lines["dr_grpo, no std"].tolist() == pytest.approx([1] * len(lines["dr_grpo, no std"]))
    # (7 * 100 + n) / (8 * 100), and (127 * 100 + n) / (128 * 100), at n = 1000
    assert lines["dapo (TRL's default), 1 group"][-1] == pytest.approx(800 / 1700)
    assert lines["dapo (TRL's default), 16 groups"][-1] == pytest.approx(12800 / 13700)
    advantages = {line.get_label(): line.get_ydata() for line in by_group.get_lines()}
    assert advantages["correct answer, no std"].tolist() == pytest.approx([1 - k / 8 for k in range(1, 8)])
    ratios = advantages["incorrect answer, std on"] / advantages["incorrect answer, no std"]
    assert ratios[0] / ratios[3] == pytest.approx(1.51, abs=0.005)
