"""TRL's correction for an engine whose probabilities are another's: what it weighs a row, by mode."""

import pytest
from sampling_correction import BOUND, SAMPLING_CORRECTIONS, Mismatched, modeled

from trl_drgrpo.features.diagnostics.statistics import QUARTERS

LENGTHS, SIGMA = (4, 16, 64, 256), 0.14  # T sigma^2 as with 512 to 2048 tokens at sigma = .05 for the last two


@pytest.fixture(scope="module")
def weighed(tmp_path_factory):
    """Mean weight of a row by its length, for each mode under the same noise: 512 rows of each length."""
    trainer = Mismatched(tmp_path_factory.mktemp("mismatched"), rows=2048, lengths=LENGTHS, sigma=SIGMA)
    weights = {mode: trainer.weights(mode, seed=1) for mode in SAMPLING_CORRECTIONS}
    assert trainer.describing.failures == {}
    return {mode: [logged[name] for name in QUARTERS] for mode, logged in weights.items()}


def test_the_model_gives_the_published_table():
    assert [round(modeled("sequence_mask", length, 0.05), 2) for length in (512, 2048)] == [0.66, 0.26]
    assert modeled("sequence_truncate", 2048, 0.05) > modeled("sequence_mask", 2048, 0.05)


@pytest.mark.parametrize("mode", SAMPLING_CORRECTIONS)
def test_each_mode_weighs_rows_as_a_lognormal_model_says(mode, weighed):
    expected = [modeled(mode, length, SIGMA) for length in LENGTHS]
    spread = BOUND / 2 / 512**0.5  # of a mean of 512 values between 0 and the bound, at most
    assert weighed[mode] == pytest.approx(expected, abs=0.01 if mode.startswith("token") else 3 * spread)


def test_the_default_has_no_slope_and_the_product_over_a_row_has():
    shortest, *_, longest = (modeled("token_truncate", length, 0.05) for length in (128, 512, 2048))
    assert shortest == longest
    assert modeled("sequence_mask", 128, 0.05) > 3 * modeled("sequence_mask", 2048, 0.05)
