"""A study that is interrupted goes on where it stopped, and only with what is its own."""

import json

import pytest

from trl_drgrpo.labs.study.resumable import Resumable

CALLS = [(seed, arm) for seed in range(2) for arm in ("a", "b")]


class Study:
    """Runs that count themselves and can be made to stop."""

    def __init__(self, folder, stop_at=None):
        self.output, self.stop_at, self.made, self.told = folder / "numbers.json", stop_at, [], []

    def run(self, seed, arm):
        if len(self.made) == self.stop_at:
            raise KeyboardInterrupt
        self.made.append((seed, arm))
        return [{"arm": arm, "seed": seed, "part": part} for part in range(2)]

    def go(self, settings=None, chosen=None):
        study = Resumable("made_up", range(2), settings or {"steps": 1}, self.output, on_part=self.told.append)
        study.once("start", lambda: self.made.append("start") or 7)
        chosen = {} if chosen is None else {"chosen": chosen}
        study.each("runs", ("seed", "arm"), CALLS, self.run, lambda row: f"{row['arm']}{row['seed']}", **chosen)
        return study.results


def keys(results):
    return [(row["seed"], row["arm"]) for row in results["runs"][::2]]


def test_what_is_in_the_file_is_not_run_again(tmp_path):
    study = Study(tmp_path, stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        study.go()
    assert study.made == ["start", *CALLS[:2]]
    study.stop_at = None
    results = study.go()
    assert study.made == ["start", *CALLS]
    assert keys(results) == CALLS
    assert study.told[-2:] == ["a1", "b1"]
    assert json.loads(study.output.read_text()) == json.loads(json.dumps(results))


def test_other_settings_begin_anew(tmp_path):
    study = Study(tmp_path)
    study.go()
    study.go({"steps": 2})
    assert study.made == ["start", *CALLS] * 2


def test_parts_that_wait_for_others_come_into_their_place(tmp_path):
    study = Study(tmp_path)
    study.go(chosen=lambda seed, arm: arm == "b")
    assert study.made == ["start", (0, "b"), (1, "b")]
    assert keys(study.go()) == CALLS
    assert study.made[3:] == [(0, "a"), (1, "a")]


def test_rows_of_more_seeds_than_asked_for_stay(tmp_path):
    Study(tmp_path).go()
    study = Resumable("made_up", range(1), {"steps": 1}, tmp_path / "numbers.json")
    study.each("runs", ("seed", "arm"), CALLS[:2], lambda *call: [], str)
    assert keys(study.results) == CALLS
