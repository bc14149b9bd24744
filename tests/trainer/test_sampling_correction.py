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


@pytest.mark.parametrize("mode", SAMPLING_CORRECTIONS)
def test_each_mode_weighs_rows_as_a_lognormal_model_says(mode, weighed):
    expected = [modeled(mode, length, SIGMA) for length in LENGTHS]
    spread = BOUND / 2 / 512**0.5  # of a mean of 512 values between 0 and the bound, at most
    assert weighed[mode] == pytest.approx(expected, abs=0.01 if mode.startswith("token") else 3 * spread)
