import math

import pytest
import torch

from trl_drgrpo.objective.step_advantages import STEP_BASELINES, step_advantages, step_token_advantages


def test_the_worked_example_of_the_paper_by_hand():
    # DeepSeekMath, section 4.1.3, process supervision: R = {{1, 0, 1}, {0, 1}}, index(j) = ends.
    # mean(R) = 3/5; normalized without std: (.4, -.6, .4) and (-.6, .4); A_t = sum of those with index(j) >= t:
    # row 0: tokens of step 1: .4 - .6 + .4 = .2; of step 2: -.2; of step 3: .4. Row 1: -.2, then .4.
    given = [[1, 0, 1], [0, 1]], [[1, 2, 4], [0, 2]], torch.ones(2, 5), 2
    advantages = step_token_advantages(*given, baseline="deepseekmath")
    expected = [[0.2, 0.2, -0.2, 0.4, 0.4], [-0.2, 0.4, 0.4, 0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_the_papers_std_is_there_when_asked_for_by_name():
    # R = {1, 0, 1, 0, 1}: mean 3/5, std (n - 1) = sqrt((3 * .16 + 2 * .36) / 4) = sqrt(.3)
    plain = step_advantages([[1, 0, 1], [0, 1]], 2, baseline="deepseekmath")
    scaled = step_advantages([[1, 0, 1], [0, 1]], 2, baseline="deepseekmath", deepseekmath_std=True)
    for before, after in zip(plain, scaled, strict=True):
        assert after == pytest.approx([value / math.sqrt(0.3) for value in before])


@pytest.mark.parametrize("credit", ["return_to_go", "immediate"])
@pytest.mark.parametrize("baseline", sorted({*STEP_BASELINES} - {"to_go", "none"}))
def test_equal_step_rewards_are_exactly_zero(credit, baseline):
    rewards = [[0.7] * 3, [0.7], [0.7, None, 0.7]]
    assert step_advantages(rewards, 3, credit, baseline) == [[0.0] * 3, [0.0], [0.0] * 3]
