"""Curves, their panels, the picture of them, the numbers of the first screen, and the push on the decision to stop."""

import pytest
from report_runs import write_run_log

from trl_drgrpo import write_report
from trl_drgrpo.common.drawing import draw_histories, smoothed
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.report.contents import report_contents
from trl_drgrpo.report.curves import Curve, axes_of, curves_of, headline
from trl_drgrpo.report.panels import other_metrics, panels_for
from trl_drgrpo.report.records import RecordedCompletions
from trl_drgrpo.report.run_folders import Logged, Run, Warned, read_run


def test_gaps_stay_gaps():
    logged = [Logged(step, "train", {"a": value}) for step, value in ((1, 1.0), (2, None), (3, 3.0), (50, 4.0))]
    curve = curves_of(logged, "train")["a"]
    assert (curve.steps, curve.values) == ([1, 2, 3, 4, 50], [1.0, None, 3.0, None, 4.0])


def test_thinning_takes_means_of_equally_many_and_keeps_the_end():
    logged = [Logged(step, "train", {"a": float(step), "b": None}) for step in range(1, 12)]
    curves = curves_of(logged, "train", points=6)
    assert list(curves) == ["a"]
    assert (curves["a"].steps, curves["a"].values) == ([2, 4, 6, 8, 10, 11], [1.5, 3.5, 5.5, 7.5, 9.5, 11.0])
    assert curves["a"].mean_of == 2
    assert len(curves_of(logged, "train", points=4)["a"].steps) <= 4


def test_tokens_and_time_never_fall_and_a_pause_is_left_out():
    times = [100.0, 110.0, 120.0, 5000.0, 5010.0]  # resumed at step 3
    tokens = [10.0, 20.0, 30.0, None, 25.0]
    logged = [Logged(i + 1, "train", {"num_tokens": tokens[i]}, times[i]) for i in range(5)]
    axes = axes_of(logged, [3])
    assert axes["time"] == [[1, 2, 3, 4, 5], [0.0, 10.0, 20.0, 30.0, 40.0]]
    assert axes["tokens"] == [[1, 2, 3, 5], [10.0, 20.0, 30.0, 30.0]]
    assert axes_of([Logged(1, "train", {"reward": 1.0})], []) == {}
    assert axes_of(logged[:1], []) == {}  # one step has no extent


def test_the_later_entry_of_a_step_and_the_runs_end():
    logged = [Logged(1, "train", {"a": 1.0}), Logged(1, "train", {"a": 2.0, "train_runtime": 3.0})]
    assert {name: curve.values for name, curve in curves_of(logged, "train").items()} == {"a": [2.0]}


WEIGHTS = [f"sampling/weight_{of}_mean" for of in ("q1", "q2", "q3", "q4", "correct", "incorrect")]
FORKS = [f"forks/{name}" for name in ("cut_frac", "cut_position", "sampled_token_frac", "live_frac")]
BY_LENGTH = ("Weight by length", ["shortest quarter", "second", "third", "longest quarter"])


@pytest.mark.parametrize(
    ("metrics", "panels", "others"),
    [
        (WEIGHTS, [BY_LENGTH, ("Weight by correctness", ["correct", "incorrect"])], []),
        (FORKS, [("Forks", ["cut", "live, of those cut"]), ("First fork", [""]), ("Sampled tokens", [""])], []),
        (
            ["sampling/draws", "sampling/groups_live", "sampling/keep_probability/0-25", "sampling/capped_frac"],
            [("Sampled prompts", ["drawn", "live"])],
            ["sampling/capped_frac"],
        ),
        # Steps and outcome of one environment have two titles.
        (
            ["rewards/Walk/mean", "rewards/my f/mean", "process_rewards/Walk/mean"],
            [("Walk, steps", [""]), ("Walk", [""]), ("my f", [""])],
            [],
        ),
        (["reward"], [("Reward", [""])], []),
    ],
)
def test_logged_metrics_are_drawn_in_their_panels(metrics, panels, others):
    found = panels_for(set(metrics))
    assert [(panel.title, [line.label for line in panel.lines]) for panel in found] == panels
    assert other_metrics(metrics, found) == others
    lines = [line for panel in found for line in panel.lines if line.label.endswith("correct")]
    assert [line.role for line in lines] == [line.label for line in lines]


def by_name(run, **curves):
    return {number["name"]: number for number in headline(run, curves)}


def test_first_and_last_are_as_logged():
    rates = Curve(list(range(1, 21)), [0.2] * 18 + [0.5, 0.848])
    run = Run("r", "r", "trl-drgrpo", warnings=[Warned(3, "kl", "high")])
    dead = Curve([1, 20], [0.0, 0.625])
    speed = Curve([1, 2, 4], [100.0, None, 300.0])
    spent = {"time/generate_s": Curve([1, 2, 4], [2.0, 5.0, 0.5]), "time/train_s": Curve([1, 2, 4], [2.0, 5.0, 0.5])}
    metrics = {"drgrpo/pass_rate": rates, "drgrpo/dead_groups_frac": dead, "time/tokens_per_s": speed}
    numbers = by_name(run, **metrics, **spent)
    rate = numbers["Pass rate"]
    assert (rate["first"], rate["last"], rate["steps"]) == (0.2, 0.848, [1, 20])
    assert rate["last_tenth"] == 0.674  # (0.5 + 0.848) / 2
    assert (numbers["Live groups"]["first"], numbers["Live groups"]["last"]) == (1.0, 0.375)
    # 400 tokens in 4 s; 300 in each second of steps 3 and 4, which were logged as 1 s each
    assert (numbers["Speed"]["last"], numbers["Speed"]["steps"]) == (166.67, [1, 4])
    assert numbers["Warnings"]["last"] == 1
    assert numbers["Mean length"]["last"] is None
    assert len(numbers) == 5


def test_steps_that_the_log_lacks_do_not_weigh_in_the_speed():
    steps = [501, *range(502, 511), 900]
    seconds = Curve(steps, [1.0] * 11)
    numbers = by_name(
        Run("r", "r", "trl-drgrpo"),
        **{"time/tokens_per_s": Curve(steps, [1000.0] + [100.0] * 9 + [1000.0]), "time/train_s": seconds},
    )
    assert numbers["Speed"]["last"] == pytest.approx(2900 / 11, abs=0.01)


def test_a_run_with_step_rewards_only_shows_these():
    zero = Curve([1, 2], [0.0, 0.0])
    numbers = by_name(
        Run("r", "r", "trl-drgrpo"),
        **{"reward": zero, "rewards/process_only/mean": zero, "process/reward_mean": Curve([1, 2], [0.25, 0.5])},
    )
    assert (numbers["Step reward"]["first"], numbers["Step reward"]["last"]) == (0.25, 0.5)
    assert "Reward" not in numbers


def evaluation(split="test", **rates):
    models = [{"role": role, "pass_at": {"1": {"value": value}}} for role, value in rates.items()]
    return {"dataset": {"name": "gsm8k", "split": split, "prompts": 1319}, "models": models}


@pytest.mark.parametrize(
    ("evaluations", "logged", "first", "last"),
    [
        ([evaluation(baseline=0.25, model=0.5)], {0: 0.1, 4: 0.2}, 0.25, 0.5),  # the same prompts, before and after
        ([evaluation(baseline=0.25, model=0.5), evaluation(baseline=0.3, model=0.6)], {}, 0.3, 0.6),  # the newest
        ([evaluation("train", baseline=0.25, model=0.5), evaluation(model=0.5)], {0: 0.1, 4: 0.2}, 0.1, 0.2),
        ([], {4: 0.2}, None, 0.2),
    ],
)
def test_held_out_accuracy_before_and_after(evaluations, logged, first, last):
    entries = [Logged(step, "eval", {"eval_drgrpo/pass_rate": rate}) for step, rate in logged.items()]
    number = headline(Run("r", "r", "trl-drgrpo", logged=entries), {}, evaluations)[0]
    assert (number["name"], number["first"], number["last"]) == ("Held-out accuracy", first, last)


def test_several_evaluation_splits_are_no_single_number():
    splits = [Logged(4, "eval", {"eval_reward": 0.5, f"eval_{split}_runtime": 1.0}) for split in ("easy", "hard")]
    assert headline(Run("r", "r", "trl-drgrpo", logged=splits[:1]), {})[0]["name"] == "Held-out reward"
    assert headline(Run("r", "r", "trl-drgrpo", logged=splits), {})[0]["name"] == "Reward"


def test_a_run_without_anything():
    numbers = by_name(Run("r", "r", "trl"))
    assert [number["last"] for number in numbers.values()] == [None] * 5
    assert list(numbers) == ["Reward", "Mean length", "Live groups", "Speed", "Warnings"]


def test_a_report_parses_each_group_once(tmp_path, monkeypatch):
    parsed = []
    load = RecordedCompletions.load
    monkeypatch.setattr(RecordedCompletions, "load", lambda self, number: parsed.append(number) or load(self, number))
    contents = report_contents([read_run(write_run_log(tmp_path / "run", steps=40, every=1))], max_groups=0)
    assert sorted(parsed) == list(range(40))
    assert contents["runs"][0]["groups"] == []


def test_without_matplotlib(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_drgrpo.report.page.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install \"trl-drgrpo\[report\]\""):
        write_report(runs, tmp_path / "x.png", "png")
    assert "![" not in write_report(runs, tmp_path / "x.md", "md").read_text()


def test_smoothing_by_hand():
    # 3% of 100 points: decay 1 - 2/4. 1/2 * 1 / (1/2) = 1; (1/2 * 1/2 + 1/2 * 3) / (1/2 * 1/2 + 1/2) = (7/4) / (3/4)
    values = smoothed([1.0, None, 3.0, *[0.0] * 98])
    assert values[0] == pytest.approx(1.0)
    assert values[1] != values[1]
    assert values[2] == pytest.approx(7 / 3)
    assert smoothed([1.0, 5.0] * 14 + [2.0]) == [1.0, 5.0] * 14 + [2.0]  # 29 points


def test_a_panel_per_metric_and_a_line_per_run_that_logged_it():
    histories = {
        "theirs": [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}, {"step": 2, "train_runtime": 9.0}],
        "ours": [{"step": 1, "reward": 0.25, "drgrpo/upstream_token_frac": 0.5}],
    }
    reward, tokens = draw_histories(histories, ["reward", "drgrpo/upstream_token_frac"]).axes
    assert reward.get_legend_handles_labels()[1] == ["theirs", "ours"]
    assert reward.get_lines()[0].get_xydata().tolist() == [[1, 0.25], [2, 0.5]]
    assert tokens.get_title() == "drgrpo/upstream_token_frac"
    assert tokens.get_legend_handles_labels()[1] == ["ours"]
    assert tokens.get_lines()[0].get_color() == reward.get_lines()[-1].get_color()  # a run keeps its color


def test_a_metric_that_no_run_logged_is_an_empty_panel(recwarn):
    [axes] = draw_histories({"run": [{"step": 1, "loss": 0.0}]}, ["reward"]).axes
    assert not axes.get_lines()
    assert axes.get_legend() is None
    assert not recwarn.list
