"""The study of the probe: measured once on the demo's model, reported from numbers that are known."""

import dataclasses
import json

import pytest

from trl_drgrpo.labs.study import probe_report, probe_study
from trl_drgrpo.labs.study.measured_models import MODELS, STARTS, even_digit_reward
from trl_drgrpo.labs.study.probe_study import SETTINGS, run_study

SMALL = dataclasses.replace(SETTINGS, models=("sums_3",), prompts=8, num_generations=2, batches=3)


@pytest.mark.slow
def test_a_model_is_measured_and_a_finished_one_is_not_measured_again(tmp_path, monkeypatch):
    output = tmp_path / "probe.json"
    results = run_study([0], output, tmp_path, settings=SMALL)
    (run,) = results["runs"]
    assert json.loads(output.read_text())["runs"] == [run]
    assert 0 < run["pass_rate"] < 1
    assert 0 <= run["states"][0] <= 1
    assert run["states"][1] > 0
    assert run["gap"][1] > 0
    monkeypatch.setattr(probe_study, "measure_one", None)
    assert run_study([0], output, tmp_path, settings=SMALL)["runs"] == [run]


def test_every_model_has_its_start():
    assert {model.start for model in MODELS.values()} == set(STARTS)
    assert set(SETTINGS.models) <= set(MODELS)
    natural = [name for name in SETTINGS.models if not MODELS[name].constructed]
    assert len(natural) >= 5


def test_even_digits():
    assert even_digit_reward(["4\nok\nkk", "3\nok\n", ""]) == [1.0, 0.0, 0.0]


def study(gaps, seeds=2):
    """Results in which the effect of each model is given, and the AUC rises from model to model."""
    models = SETTINGS.models[-len(gaps) :]
    runs = [
        {
            "model": name,
            "seed": seed,
            "pass_rate": 0.5,
            "length_right": 10.0,
            "length_wrong": 12.0,
            "states": [0.5 + 0.04 * number, 0.01],
            "position": [0.5, 0.01],
            "difference": [0.04 * number, 0.01],
            "open_stops": 0.3,
            "apart": 0.01 * number,
            "gap": [gap + (seed - 0.5), 1.0],
        }
        for seed in range(seeds)
        for number, (name, gap) in enumerate(zip(models, gaps, strict=True))
    ]
    return {"settings": {"models": models}, "runs": runs}


def test_the_sentence_says_what_the_points_say():
    rising, falling = [1, 3, 2, 5, 4, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 2]
    verdicts = ("is borne out", "is contradicted", "is not borne out")
    for gaps, verdict in zip((rising, falling, [3, 1, 2, 5, 4, 2, 3, 3]), verdicts, strict=True):
        over_all = probe_report.sentence(study(gaps)).split(". Over")[0]
        assert over_all.endswith(f"the prediction {verdict}")


def test_the_table_has_a_row_per_model():
    results = study([1, 2, 3, 4, 5, 6])
    lines = probe_report.table(results).splitlines()
    assert len(lines) == 2 + 6
    assert "| 0.500 ± 0.000 | 0.500 ± 0.000 | 0.30 | 0.000 | +1.0 ± 6.4 |" in lines[2]


def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert probe_report.draw(study([1, 2, 3, 4, 5, 6]), tmp_path / "probe.png").stat().st_size > 10_000
