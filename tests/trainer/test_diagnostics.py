"""The diagnostics in real runs of the tiny model."""

import dataclasses
import json
import math
import os
import statistics
from pathlib import Path

import pytest
import runs
import torch
from runs import STOCK, assert_same_weights, failing, parity_reward, read_lines, short_run, step_reward, weights
from transformers import HfArgumentParser, TrainerCallback
from trl import GRPOTrainer

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.cli import flags
from trl_drgrpo.cli import recipe as recipes
from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.features.diagnostics.diagnostics import BatchSnapshot
from trl_drgrpo.features.diagnostics.run_log import DETAILS
from trl_drgrpo.features.diagnostics.run_warnings import RunWarnings, warning_thresholds
from trl_drgrpo.features.diagnostics.statistics import BUCKETS
from trl_drgrpo.features.resume.checkpoints import FEATURES_FILE
from trl_drgrpo.process_rewards.steps.alignment import Aligner
from trl_drgrpo.report.contents import report_contents
from trl_drgrpo.report.run_folders import read_run
from trl_drgrpo.upstream.batches import CreditedBatch, ScoredBatch

HAIR_TRIGGER = {"truncation": {"share": 0.0, "steps": 1}}


@pytest.fixture
def run(train):
    return lambda reward=parity_reward, **given: train(reward, **given)


def read(output, name):
    path = output / "_drgrpo" / name
    return json.loads(path.read_text(encoding="utf-8")) if name.endswith(".json") else read_lines(path)


class Capture(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prompts, tokenizer):
    """One run for several tests: its trainer, its settings, what a callback saw, and the trackers' folder."""
    pytest.importorskip("tensorboard")
    fields = short_run(tmp_path_factory.mktemp("whole") / "run") | {"report_to": "tensorboard"}
    fields |= {"max_steps": 4, "record_groups": -1, "hub_token": "hf_secret", "correct_threshold": 1.0}
    capture = Capture()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path_factory.mktemp("events")))
        trainer = runs.train(DrGRPOTrainer, fields, prompts, tokenizer, parity_reward, callbacks=[capture])
        return trainer, fields, capture.seen, os.environ["TENSORBOARD_LOGGING_DIR"]


def test_the_run_log_of_a_run(whole):
    trainer = whole[0]
    output = Path(trainer.args.output_dir)
    facts = read(output, "run.json")
    assert facts["ended"]["how"] == "finished"
    assert [(start["step"], start["device"], start["processes"]) for start in facts["starts"]] == [(0, "cpu", 1)]
    assert facts["objective"]["loss_normalizer"] == 12
    assert "A_i  = r_i - mean of its group's 4 rewards" in facts["formula"]
    assert facts["right"] == {"reward": "parity_reward", "threshold": 1.0}
    assert facts["rewards"] == {"names": ["parity_reward"], "weights": [1.0]}
    assert (facts["max_steps"], facts["step_rewards"], facts["adapter"]) == (4, None, None)
    assert facts["speed"] == trainer.fast_path.speed.facts()
    assert {part for part, reason in facts["speed"].items() if reason != "yes"} == {"recorded steps"}
    shown = read_run(output).facts["fast path"]
    assert shown.startswith("prompts run once, group cache, dropped rows, planned micro-batches, skipped rows, shared")
    assert shown.endswith("; without recorded steps: steps are recorded on a GPU, this device is cpu")
    assert "hf_secret" not in json.dumps(facts)
    metrics = read(output, "metrics.jsonl")
    assert [entry["step"] for entry in metrics] == [1, 2, 3, 4, 4]  # the last one is transformers' summary
    for entry, logged in zip(metrics, trainer.state.log_history, strict=True):
        details = {name: value for name, value in entry["logs"].items() if DETAILS.match(name)}
        assert {name: logged[name] for name in entry["logs"] if name not in details} | details == entry["logs"]
    assert {entry["step"] for entry in read(output, "completions.jsonl")} == {1, 2, 3, 4}


def test_logged_metrics_are_those_of_the_recorded_rows(whole):
    output = Path(whole[0].args.output_dir)
    groups = read(output, "completions.jsonl")
    for entry in read(output, "metrics.jsonl")[:4]:
        logs, of_step = entry["logs"], [g for g in groups if g["step"] == entry["step"]]
        rows = [row for group in of_step for row in group["rows"]]
        assert (len(of_step), len(rows)) == (2, 8)
        assert logs["drgrpo/pass_rate"] == statistics.fmean(row["reward"] for row in rows)
        assert logs["reward"] == pytest.approx(logs["drgrpo/pass_rate"])
        assert logs["completions/clipped_ratio"] == statistics.fmean(row["truncated"] for row in rows)
        assert logs["completions/mean_length"] == pytest.approx(statistics.fmean(row["length"] for row in rows))
        for name, wanted in (("correct", 1.0), ("incorrect", 0.0)):
            lengths = [row["length"] for row in rows if row["reward"] == wanted]
            mean = logs.get(f"completions/length_{name}_mean")
            assert mean == (pytest.approx(statistics.fmean(lengths)) if lengths else None)
        dead = [len({row["reward"] for row in group["rows"]}) == 1 for group in of_step]
        assert logs["drgrpo/dead_groups_frac"] == statistics.fmean(dead) == logs["frac_reward_zero_std"]
        shares = dict.fromkeys(BUCKETS, 0.0)
        for group in of_step:
            bucket = dict(zip((0, 1, 2, 3, 4), ("0", "0-25", "25-50", "50-75", "100"), strict=True))
            weight = sum(abs(row["advantage"]) * row["length"] for row in group["rows"])
            shares[bucket[4 * group["baseline"]]] += weight
        if total := sum(shares.values()):
            logged = {b: logs[f"difficulty/gradient_weight_frac/{b}"] for b in shares}
            assert logged == pytest.approx({b: part / total for b, part in shares.items()})
        seconds = [logs[f"time/{phase}_s"] for phase in ("generate", "train", "score")]
        assert min(seconds[:2]) > 0
        assert logs["time/tokens_per_s"] == pytest.approx(sum(row["length"] for row in rows) / sum(seconds))


def test_the_run_log_has_every_step_however_seldom_the_run_logs(whole, run, tmp_path):
    seldom = run(**{**whole[1], "output_dir": str(tmp_path / "seldom"), "logging_steps": 3, "report_to": "none"})
    every = {entry["step"]: entry["logs"] for entry in read(Path(whole[1]["output_dir"]), "metrics.jsonl")[:4]}
    lines = [entry for entry in read(tmp_path / "seldom", "metrics.jsonl") if "reward" in entry["logs"]]
    # The last one is transformers' summary, with what was not logged yet.
    assert [(entry["step"], entry["mode"]) for entry in lines] == [(step, "train") for step in (1, 2, 3, 4, 4)]
    for entry in lines:
        logs = entry["logs"]
        for name in ("reward", "drgrpo/pass_rate", "completions/mean_length", "num_tokens", "entropy"):
            assert logs[name] == pytest.approx(every[entry["step"]][name])
        assert logs["time/generate_s"] > 0
        assert ("loss" in logs) == (entry["step"] == 3)
    # Trackers and the log history get what they got: means over the interval.
    logged = [entry for entry in seldom.state.log_history if "reward" in entry]
    assert [entry["step"] for entry in logged] == [3, 4]
    assert logged[0]["reward"] == pytest.approx(statistics.fmean(every[step]["reward"] for step in (1, 2, 3)))
    report = report_contents([read_run(tmp_path / "seldom")])["runs"][0]
    assert report["curves"]["reward"][0] == [1, 2, 3, 4]


def test_looking_changes_nothing(whole, run, tmp_path):
    silent = {"output_dir": str(tmp_path / "off"), "run_log": False, "run_warnings": False}
    unseen = run(**{**whole[1], **silent})
    assert_same_weights(weights(whole[0]), weights(unseen))
    assert not (tmp_path / "off" / "_drgrpo").exists()


def test_callbacks_and_trackers_see_what_was_logged_once(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, _, seen, folder = whole
    assert ["drgrpo/pass_rate" in logs and "time/train_s" in logs for logs in seen] == [True] * 4 + [False]
    events = EventAccumulator(folder)
    events.Reload()
    for name in ("drgrpo/pass_rate", "time/train_s"):
        logged = {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
        assert {e.step: e.value for e in events.Scalars(f"train/{name}")} == pytest.approx(logged)


# Beside TRL's. With vLLM `sampling/sync_seconds` and `sampling/sync_bytes` come on top.
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"forks": 2, "step_separator": ["tokens:3"]},
        {"dynamic_sampling": True, "curriculum": True, "max_sampling_rounds": 4, "step_separator": ["tokens:3"]},
    ],
    ids=["plain", "forks", "sampling"],
)
def test_at_most_28_metrics_of_ours_reach_the_trackers(fields, run, output):
    steps = {"step_reward_funcs": step_reward} if "step_separator" in fields else {}
    ours = run(**steps, **fields)
    stock = run(trainer_class=GRPOTrainer, **STOCK)
    of_trl = {name for logs in stock.state.log_history for name in logs}
    new = {name for logs in ours.state.log_history for name in logs} - of_trl
    assert len(new) <= 28, sorted(new)
    in_the_log = {name for entry in read(output, "metrics.jsonl") for name in entry["logs"]}
    assert len(in_the_log - new - of_trl) >= 18  # none is lost


def test_step_rewards_mark_the_spans(run, output):
    run(step_separator=["tokens:3"], max_steps=2, step_reward_funcs=step_reward)
    rows = [row for group in read(output, "completions.jsonl") for row in group["rows"]]
    for row in rows:
        steps = [span["step"] for span in row["spans"]]
        assert steps == list(range(len(steps)))
        assert 1 <= len(steps) <= math.ceil(row["length"] / 3)  # a step ends with a character, which may take 4 tokens
        assert all(span["step_reward"] in (0.0, 1.0, 2.0) for span in row["spans"])
    assert any(len({span["advantage"] for span in row["spans"]}) > 1 for row in rows)
    assert read(output, "run.json")["step_rewards"] == {"names": ["step_reward"], "weights": [1.0]}
    logs = read(output, "metrics.jsonl")[0]["logs"]
    assert sum(v for name, v in logs.items() if name.startswith("difficulty/gradient_weight_frac/")) == pytest.approx(
        1
    )
    assert logs["time/score_s"] > 0


def test_an_outcome_reward_that_is_none_says_nothing_about_correctness(run):
    trainer = run(None, step_reward_funcs=step_reward, max_steps=1, step_separator=["tokens:3"])
    assert trainer.diagnostics.correctness_rule is None
    assert "drgrpo/pass_rate" not in trainer.state.log_history[0]
    assert trainer.state.log_history[0]["drgrpo/dead_groups_frac"] < 1  # steps earned different rewards


def test_a_continuous_reward_says_once_what_to_set(train, output, caplog):
    with caplog.at_level("INFO", logger="trl_drgrpo"):
        trainer = train()
    assert caplog.text.count("Set correct_threshold") == 1
    assert not [
        name for entry in trainer.state.log_history for name in entry if "correct" in name or "pass_rate" in name
    ]
    assert all(row["right"] is None for row in read(output, "completions.jsonl")[-1]["rows"])


def test_evaluations_are_logged_without_metrics_of_training(run, prompts, output):
    fields = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "max_steps": 2}
    run(eval_dataset=prompts.select(range(2)), **fields)
    evaluation = next(entry for entry in read(output, "metrics.jsonl") if entry["mode"] == "eval")
    assert 0 <= evaluation["logs"]["eval_drgrpo/pass_rate"] <= 1
    assert "eval_completions/unique_frac" in evaluation["logs"]
    of_training = ("gradient_weight", "dead_groups", "time/")
    assert not [name for name in evaluation["logs"] if any(word in name for word in of_training)]
    groups = [group for group in read(output, "completions.jsonl") if group["mode"] == "eval"]
    assert [(group["step"], group["group"]) for group in groups] == [(2, 0), (2, 1)]  # of two batches


def test_groups_of_a_step_that_generates_twice_have_different_numbers(run, output):
    run(steps_per_generation=1, max_steps=2)
    groups = [(group["step"], group["group"]) for group in read(output, "completions.jsonl")]
    assert groups == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert read_run(output).completions.groups == 4


def test_a_run_that_fails_says_how(run, output):
    with pytest.raises(RewardError):
        run(failing(2))
    assert read(output, "run.json")["ended"]["how"] == "failed: RewardError"
    assert read(output, "run.json")["ended"]["step"] == 1


def test_a_resumed_run_appends_repeats_no_warning_and_records_the_same(run, output):
    fields = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "record_groups": 1}
    fields |= {"run_warnings": HAIR_TRIGGER, "correct_threshold": None}
    whole = run(**fields)
    before = read(output, "completions.jsonl")
    assert [(w["step"], w["cause"]) for w in read(output, "warnings.jsonl")] == [(1, "truncation")]
    resumed = run(**fields, resume=output / "checkpoint-2")
    assert_same_weights(weights(whole), weights(resumed))
    assert [start["step"] for start in read(output, "run.json")["starts"]] == [0, 2]
    assert len(read(output, "warnings.jsonl")) == 1

    def untimed(groups):
        return [{key: value for key, value in group.items() if key != "time"} for group in groups]

    assert untimed(read(output, "completions.jsonl")) == untimed(before + before[2:])


def test_observations_of_a_reward_survive_a_resume(train, output, caplog):
    train(save_strategy="steps", save_steps=2)
    checkpoint = output / "checkpoint-2"
    state = json.loads((checkpoint / FEATURES_FILE).read_text())["Diagnostics"]
    assert state["right_is_binary"] is False
    caplog.clear()
    resumed = train(save_strategy="steps", save_steps=2, resume=checkpoint)
    assert resumed.diagnostics.correctness_rule.is_binary is False
    assert "correct_threshold" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "generating"), [({"num_iterations": 2}, [1, 3]), ({"steps_per_generation": 1}, [1, 2, 3])]
)
def test_the_watches_see_every_optimizer_step_however_seldom_it_is_logged(
    run, output, monkeypatch, fields, generating
):
    observed, observe = [], RunWarnings.observe
    monkeypatch.setattr(
        RunWarnings,
        "observe",
        lambda self, step, metrics: (observed.append((step, metrics)), observe(self, step, metrics)),
    )
    trainer = run(logging_steps=2, max_steps=3, record_groups=-1, run_warnings=HAIR_TRIGGER, **fields)
    assert [entry["step"] for entry in trainer.state.log_history[:-1]] == [2]
    assert [step for step, _ in observed] == [1, 2, 3]
    assert all("step_time" in metrics for _, metrics in observed)
    assert [step for step, metrics in observed if "reward" in metrics] == generating
    groups = read(output, "completions.jsonl")
    for step, metrics in observed:
        rewards = [row["reward"] for group in groups if group["step"] == step for row in group["rows"]]
        assert metrics.get("reward") == (pytest.approx(statistics.fmean(rewards)) if rewards else None)
        assert metrics.get("drgrpo/reward_min") == (0.0 if 0.0 in rewards else 1.0 if rewards else None)
    assert [(w["step"], w["cause"]) for w in read(output, "warnings.jsonl")] == [(1, "truncation")]


def test_settings_from_the_command_line_and_from_recipes(monkeypatch):
    for field in dataclasses.fields(DrGRPOConfig):  # transformers' parser changes them in place
        monkeypatch.setattr(field, "type", field.type)
    flag = flags.read_flags()["run_warnings"]
    for given, threshold in ((True, 0.8), ("true", 0.8), ('{"dead_groups": {"share": 0.5}}', 0.5)):
        config = DrGRPOConfig(run_warnings=recipes.coerce(flag, given))
        assert (config.run_warnings is True) == (threshold == 0.8)
    assert DrGRPOConfig(run_warnings=recipes.coerce(flag, "false")).run_warnings is False
    recipe = {"kl": False, "truncation": {"share": 0.9}}
    assert DrGRPOConfig(run_warnings=recipes.coerce(flag, recipe)).run_warnings == recipe
    with pytest.raises(InputError, match="^run_warnings: got 'kll'"):
        DrGRPOConfig(run_warnings=recipes.coerce(flag, '{"kll": false}'))
    (config,) = HfArgumentParser((DrGRPOConfig,)).parse_args_into_dataclasses(  # TrlParser's base
        ["--output_dir", "x", "--run_warnings", "false", "--correct_threshold", "0.5"]
    )
    assert (config.run_warnings, config.correct_threshold) == (False, 0.5)


def test_a_tools_tokens_are_masked_spans_and_no_length(tokenizer):
    # Two rows of one group; the tool wrote the middle three tokens of the first.
    first, second = tokenizer.encode("ab123cd"), tokenizer.encode("xyz")
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    trained = mask * torch.tensor([[1, 1, 0, 0, 0, 1, 1], [1] * 7])
    scored = ScoredBatch(torch.tensor([[1.0], [0.0]]), [{"prompt": "p"}] * 2, ["p"] * 2, [None] * 2, [first, second])
    advantages = torch.tensor([0.5, -0.5])
    batch = CreditedBatch(
        scored=scored,
        rewards=torch.tensor([1.0, 0.0]),
        advantages=advantages,
        completion_mask=mask,
        trained_mask=trained,
        num_generations=2,
        own_rows=slice(0, 2),
    )
    seen = BatchSnapshot(batch, 0, {second[-1]}, {0})
    own = {name: seen.rank_rows[name] for name in ("lengths", "trained", "gradient_weights", "truncated")}
    assert own == {
        "lengths": [4, 3],
        "trained": [4, 3],
        "gradient_weights": [2.0, 1.5],
        "truncated": [True, False],
    }
    rows = list(seen.records(["r"], [True, False], Aligner(tokenizer)))
    assert [[(s["text"], s["advantage"], s["masked"]) for s in row["spans"]] for row in rows] == [
        [("ab", 0.5, False), ("123", 0, True), ("cd", 0.5, False)],
        [("xyz", -0.5, False)],
    ]
    assert [(row["right"], row["rewards"], row["columns"]) for row in rows] == [
        (True, {"r": 1.0}, {}),
        (False, {"r": 0.0}, {}),
    ]


def test_a_truncated_row_that_is_masked_is_recorded_as_such(run, output):
    run(mask_truncated_completions=True, max_completion_length=4, record_groups=-1)
    rows = [row for group in read(output, "completions.jsonl") for row in group["rows"]]
    cut = [row for row in rows if row["truncated"]]
    assert cut
    assert all(span["masked"] and span["advantage"] == 0 for row in cut for span in row["spans"])
    assert all(row["length"] == 4 for row in cut)


def test_a_run_that_forks_records_its_trees(run, output):
    forked = {"forks": 2, "fork_depth": 2, "num_generations": 8, "step_separator": ["tokens:2"]}
    run(record_groups=-1, max_steps=1, per_device_train_batch_size=8, **forked)
    assert read(output, "run.json")["settings"]["fork_depth"] == 2
    groups = read(output, "completions.jsonl")
    assert {tuple(group["forks"]) for group in groups} == {(2, 2)}
    report = report_contents([read_run(output)])
    assert {"Forks", "Sampled tokens"} <= {panel["title"] for panel in report["panels"]}
    trees = [(group["rows"], group["tree"]) for group in report["runs"][0]["groups"]]
    assert len(trees) == len(groups) == 2
    cut = [(rows, node) for rows, parents in trees for node in parents if node["branches"]]
    assert cut
    for rows, node in cut:
        stretches = [[span for span in row["spans"] if span["level"] == 0] for row in rows[slice(*node["rows"])]]
        assert all(stretch == stretches[0] for stretch in stretches)  # one text, one advantage
        first, second = (branch["reward"] for branch in node["branches"])
        assert node["branches"][0]["advantages"] == pytest.approx([first - second] * 2, abs=1e-5)


def test_every_cause_has_its_defaults_documented():
    text = Path("recipes/guides/monitoring.md").read_text(encoding="utf-8")
    for cause, thresholds in warning_thresholds(True).items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{cause}`"))
        for name, value in thresholds.items():
            assert f"`{name}` {value:g}" in line, (cause, name)
