"""Gradient noise where it is known, and the study on the demo's model."""

import dataclasses

import numpy as np
import pytest
import torch

from trl_drgrpo.labs.study import variance_report
from trl_drgrpo.labs.study.variance_study import FAMILY, SETTINGS, Gradients, exponent, run_study, shares

SMALL = dataclasses.replace(SETTINGS, models=("sums_3",), prompts=2, num_generations=4, batches=4, single_batches=1)


def test_noise_and_alignment_of_a_known_distribution():
    """Mean (3, 4, 0 ...) of length 5, variance 2 in each of 50 dimensions: trace 100, 100 / 25 = 4 batches of 6
    groups; the other one has a mean at 60 degrees and no noise."""
    rng = np.random.default_rng(0)
    mean, tilted = np.zeros(50), np.zeros(50)
    mean[:2] = 3, 4
    tilted[:3] = 3 * 0.5, 4 * 0.5, 5 * 3**0.5 / 2
    gradients = Gradients(["noisy", "sure"])
    for _ in range(1500):
        noisy = torch.from_numpy(mean + rng.normal(scale=2**0.5, size=50))
        gradients.add({"noisy": noisy, "sure": torch.from_numpy(tilted)})
    assert gradients.noise("noisy", groups=6) == pytest.approx(24, rel=0.1)
    assert gradients.noise("sure", groups=6) == pytest.approx(0, abs=1e-6)
    assert gradients.alignment("noisy", "sure") == pytest.approx(0.5, abs=0.05)
    assert gradients.alignment("sure", "sure") == pytest.approx(1)


def test_noise_without_a_signal_is_not_a_number():
    gradients = Gradients(["one"])
    for sign in (1, -1, 1, -1):
        gradients.add({"one": sign * torch.ones(3)})
    assert np.isnan(gradients.noise("one", 4))
    assert np.isnan(gradients.alignment("one", "one"))


def test_the_exponent_is_that_of_a_power():
    lengths = np.array([2, 4, 8, 16, 32])
    assert exponent(lengths, 7.0 * lengths**1.5) == pytest.approx(1.5)
    assert np.isnan(exponent(np.full(3, 4), np.array([1.0, 2.0, 3.0])))


def test_shares_are_by_length():
    lengths = np.array([9, 1, 5, 2, 6, 8])
    assert shares(lengths, np.array([3.0, 1.0, 1.0, 1.0, 1.0, 3.0])) == [0.2, 0.2, 0.6]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variance")
    return run_study([0, 1], folder / "variance.json", folder, settings=SMALL)


@pytest.mark.slow
def test_a_model_is_measured(measured):
    run = measured["runs"][0]
    assert set(run["noise"]) == set(FAMILY)
    assert run["exponent"] is None or 0 < run["exponent"] < 3
    for each in run["shares"].values():
        assert sum(each) == pytest.approx(1, abs=1e-3)


def test_tables_and_figure(measured, tmp_path):
    for run in measured["runs"]:
        run["noise"] = dict.fromkeys(FAMILY, 8.0) | {"dr_grpo": 12.0}
    (row,) = variance_report.noise_table(measured).splitlines()[2:]
    assert row.endswith("| 8.0 ± 0.0 | 8.0 ± 0.0 | 12.0 ± 0.0 | 1.50 ± 0.00 |")
    assert variance_report.noise_table(measured, with_std=True).endswith("| 1.00 ± 0.00 |")
    measured["runs"][0]["noise"]["dr_grpo"] = None
    assert variance_report.noise_table(measured).endswith("| unknown | unknown |")
    pytest.importorskip("matplotlib")
    assert variance_report.draw(measured, tmp_path / "variance.png").stat().st_size > 10_000
