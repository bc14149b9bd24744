"""The embedded demo: the task and its judges, the tokenizer, the shipped model, process rewards, short runs."""

import argparse
import importlib.util
import json
import math
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from trl import GRPOConfig

from trl_drgrpo.cli import short_commands
from trl_drgrpo.common.drawing import save_figure
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.demo import MODEL_DIR, STOCK_OBJECTIVES, run, task
from trl_drgrpo.demo.build import TERMS, add_with_gaps, demonstrate_with_gaps
from trl_drgrpo.demo.pace import Pace, draw_pace, reached
from trl_drgrpo.demo.result import evaluate, objectives_table, pace_sentence
from trl_drgrpo.demo.run import run_demo
from trl_drgrpo.demo.task import IM_END, PROCESS_SETTINGS, build_tokenizer, line_is_right, line_reward, step_numbers
from trl_drgrpo.process_rewards.steps import step_segmenter
from trl_drgrpo.report import write_report

problems = st.lists(st.integers(1, 9), min_size=2, max_size=8)
seeds = st.integers(0, 2**32)

RIGHT = "3+8=11\n11+5=16\nok 11+5=16\n16+2=18\n\\boxed{18}"


@pytest.fixture(scope="module")
def shipped():
    load = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    return tuple(each.from_pretrained(MODEL_DIR) for each in load)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    short_commands.add_arguments_demo(parser)
    return parser.parse_args(arguments)


class TestProblems:
    def test_same_seed_same_problems(self):
        assert task.make_problems(50, seed=3) == task.make_problems(50, seed=3)
        assert task.make_problems(50, seed=3) != task.make_problems(50, seed=4)

    def test_splits_are_disjoint_in_any_order_and_for_any_seed(self):
        train = {tuple(sorted(p)) for seed in range(3) for p in task.make_problems(2000, "train", seed)}
        held_out = {tuple(sorted(p)) for seed in range(3) for p in task.make_problems(500, "held_out", seed)}
        assert len(train) > 500
        assert len(held_out) > 50
        assert not train & held_out

    @given(problems, st.randoms(use_true_random=False))
    def test_split_does_not_depend_on_the_order(self, numbers, rng):
        shuffled = list(numbers)
        rng.shuffle(shuffled)
        assert task.split_of(shuffled) == task.split_of(numbers)

    def test_dataset_columns(self):
        dataset = task.make_dataset(5, "held_out", seed=1)
        assert dataset.column_names == ["prompt", "answer"]
        for row, numbers in zip(dataset, task.make_problems(5, "held_out", seed=1), strict=True):
            assert row["prompt"] == [{"role": "user", "content": "+".join(map(str, numbers))}]
            assert row["answer"] == str(sum(numbers))
            assert task.numbers_of(row["prompt"]) == list(numbers)

    @pytest.mark.parametrize(
        ("call", "given", "message"),
        [
            *[(task.numbers_of, [text], "prompt: got") for text in ("", "3", "3+", "3+x", "3-2", "hello")],
            (task.make_problems, [0], "size: got 0; expected at least 1"),
            (task.make_problems, [1, "test"], "split: got 'test'"),
        ],
    )
    def test_bad_arguments(self, call, given, message):
        with pytest.raises(InputError, match=message):
            call(*given)


class TestReward:
    @pytest.mark.parametrize(
        ("text", "reward"),
        [
            (RIGHT, 1.0),
            ("\\boxed{18}", 1.0),  # an outcome reward looks at the outcome only
            ("\\boxed{018}", 1.0),  # the same number
            ("\\boxed{8}", 0.0),
            ("\\boxed{18}\n\\boxed{17}", 0.0),  # the last one counts
            ("18", 0.0),
            ("\\boxed{}", 0.0),
            ("\\boxed{" + 9999 * "1" + "}", 0.0),  # more digits than int() takes
            ("\\boxed{18", 0.0),
            ("", 0.0),
        ],
    )
    def test_golden(self, text, reward):
        assert task.list_sum_reward([text], ["18"]) == [reward]
        assert task.list_sum_reward([[{"role": "assistant", "content": text}]], [18], other=[None]) == [reward]

    for answer in ("eighteen", float("inf"), [18]):
        with pytest.raises(InputError, match="column answer: got .*expected a whole number in every row"):
            task.list_sum_reward(["18"], [answer])


class TestCheckSteps:
    @pytest.mark.parametrize(
        ("text", "verdicts"),
        [
            (RIGHT, [True, True, True, True, True]),
            # Dropped carry in line 1 (3+8=1): charged once; what carries it on follows from it.
            ("3+8=1\n1+5=6\n6+2=8\n\\boxed{8}", [False, True, True, True]),
            # Wrong term in line 2 (6 instead of 5).
            ("3+8=11\n11+6=17\n17+2=19\n\\boxed{19}", [True, False, True, True]),
            # Does not start from the total above it.
            ("3+8=11\n10+5=15\n15+2=17\n\\boxed{17}", [True, False, True, True]),
            # A check line of a wrong sum, of another line, before any line, and one misspelled.
            ("3+8=1\nok 3+8=1", [False, False]),
            ("3+8=11\nok 3+8=12", [True, False]),
            ("ok 3+8=11\n3+8=11", [False, True]),
            ("3+8=11\nko 3+8=11", [True, False]),
            # Boxed too early, boxed another number, a line after the boxed one, an addition too many.
            ("3+8=11\n\\boxed{11}", [True, False]),
            ("3+8=11\n11+5=16\n16+2=18\n\\boxed{8}", [True, True, True, False]),
            ("3+8=11\n11+5=16\n16+2=18\n\\boxed{18}\n16+2=18", [True, True, True, True, False]),
            ("3+8=11\n11+5=16\n16+2=18\n18+2=20\n\\boxed{20}", [True, True, True, False, True]),
            # Nothing, blank lines, nonsense.
            ("", []),
            ("\n\n3+8=11\n\n", [True]),
            ("hello\n3+8=11", [False, True]),
        ],
    )
    def test_golden(self, text, verdicts):
        assert task.check_steps([3, 8, 5, 2], text) == verdicts

    @given(problems, seeds)
    def test_a_faultless_demonstration_is_right_line_by_line(self, numbers, seed):
        text = task.demonstrate(numbers, random.Random(seed), add=lambda total, term, rng: total + term)
        assert all(task.check_steps(numbers, text))
        assert task.list_sum_reward([text], [sum(numbers)]) == [1.0]

    @given(problems, seeds)
    def test_all_lines_right_and_boxed_means_the_right_answer(self, numbers, seed):
        rng = random.Random(seed)
        lines = task.demonstrate(numbers, rng).split("\n")
        for _ in range(rng.randint(0, 2)):  # damage: repeat, drop or swap lines
            lines.insert(rng.randrange(len(lines)), lines.pop(rng.randrange(len(lines))))
        text = "\n".join(lines)
        if all(task.check_steps(numbers, text)) and lines[-1].startswith("\\boxed"):
            assert task.list_sum_reward([text], [sum(numbers)]) == [1.0]


class TestDemonstrator:
    def test_right_and_wrong_completions_differ_in_length(self):
        rng = random.Random(0)
        drawn = task.make_problems(4000)
        texts = [task.demonstrate(numbers, rng) for numbers in drawn]
        rewards = task.list_sum_reward(texts, [sum(numbers) for numbers in drawn])
        right = [len(text) for text, reward in zip(texts, rewards, strict=True) if reward]
        wrong = [len(text) for text, reward in zip(texts, rewards, strict=True) if not reward]
        assert len(right) / len(texts) == pytest.approx(0.29, abs=0.03)
        assert sum(wrong) / len(wrong) > sum(right) / len(right) + 5
        assert max(right + wrong) < 100


LONG_PROBLEMS = task.make_problems(2000, terms=TERMS)


def test_half_of_the_table_is_known_and_the_other_half_wrong_in_one_way():
    written = {
        (units, term): {add_with_gaps(10 + units, term, random.Random(seed)) - 10 - units - term for seed in range(40)}
        for units in range(10)
        for term in range(1, 10)
    }
    gaps = [wrong for wrong in written.values() if wrong != {0}]
    assert 0.35 < len(gaps) / len(written) < 0.65
    assert all(0 in wrong and len(wrong) == 2 for wrong in gaps)  # now and then it is right
    assert all(min(wrong) == 0 for wrong in gaps)  # too much, never too little: two mistakes do not cancel


def test_a_wrong_line_is_a_wrong_answer():
    rng = random.Random(0)
    texts = [demonstrate_with_gaps(numbers, rng) for numbers in LONG_PROBLEMS]
    verdicts = [task.check_steps(numbers, text) for numbers, text in zip(LONG_PROBLEMS, texts, strict=True)]
    right = task.list_sum_reward(texts, [sum(numbers) for numbers in LONG_PROBLEMS])
    assert [all(lines) for lines in verdicts] == [reward == 1.0 for reward in right]
    assert 0.05 < sum(right) / len(right) < 0.15
    assert 0.7 < sum(map(sum, verdicts)) / sum(map(len, verdicts)) < 0.85
    assert max(map(len, texts)) < 112  # a character is a token


def rewards_of(text: str, numbers: tuple[int, ...] = (3, 8, 5, 2)) -> list[float | None]:
    """What the trainer's way through tokens, steps and rule gives for a completion."""
    tokenizer = build_tokenizer()
    steps = step_segmenter(PROCESS_SETTINGS["step_separator"])(tokenizer.encode(text), tokenizer)
    (row,) = line_reward(prompts=[task.prompt_of(numbers)], completions=[text], steps=[steps.texts])
    assert len(row) == len(steps.ends)
    return row


class TestLineReward:
    @pytest.mark.parametrize(
        ("text", "rewards"),
        [
            (RIGHT + IM_END, [1.0, 1.0, None, 1.0, 1.0]),  # an `ok` line is no progress
            ("3+8=1\n1+5=6\n6+2=8\n\\boxed{8}" + IM_END, [0.0, 1.0, 1.0, 1.0]),
            # Truncated inside a line, and behind one.
            ("3+8=11\n11+5=1", [1.0, 0.0]),
            ("3+8=11\n11+5=16\n", [1.0, 1.0]),
            # Blank lines and a bare end token are part of the step before them; alone, they cannot be scored.
            (f"3+8=11\n{IM_END}", [1.0]),
            ("\n3+8=11\n\n \n11+5=16", [1.0, 1.0]),
            (IM_END, [None]),
            (f"\n\n{IM_END}", [None]),
            ("", []),
            # The same `ok` line again and again would be paid every time; a wrong one costs.
            ("3+8=11" + 3 * "\nok 3+8=11", [1.0, None, None, None]),
            ("3+8=12\nok 3+8=12", [0.0, 0.0]),
        ],
    )
    def test_golden(self, text, rewards):
        assert rewards_of(text) == rewards

    def test_a_step_of_several_lines_is_right_if_all_are(self):
        assert line_is_right("3+8+5", (), "3+8=11\n11+5=16\n") == 1.0
        assert line_is_right("3+8+5", (), "3+8=11\n11+5=17\n") == 0.0

    @given(problems, seeds, st.none() | st.text(alphabet="0123456789+=ok \n\\boxed{}", max_size=60))
    def test_any_text_gets_one_reward_per_step_and_all_verdicts(self, numbers, seed, text):
        text = task.demonstrate(numbers, random.Random(seed)) if text is None else text
        scored = [reward for reward in rewards_of(text + IM_END, tuple(numbers)) if reward is not None]
        lines = filter(None, map(str.strip, text.split("\n")))
        assert scored == [
            float(right)
            for line, right in zip(lines, task.check_steps(numbers, text), strict=True)
            if not (right and line.startswith("ok "))
        ]


def test_numbers_of_steps():
    # 5 lines, all right, one of them `ok`; 2 lines, one right.
    numbers = step_numbers([(3, 8, 5, 2), (3, 8)], [RIGHT, "3+8=1\n\n\\boxed{1}"])
    assert numbers == {"steps_mean": 3.5, "process_reward": 6 / 7, "ok_steps_frac": 1 / 7}
    assert set(step_numbers([(3, 8)], [""]).values()) == set(step_numbers([], []).values()) == {0.0}


def test_the_tokenizer_reads_and_writes_the_task():
    tokenizer = build_tokenizer()
    ids = tokenizer(RIGHT)["input_ids"]
    assert len(ids) == len(RIGHT)
    assert tokenizer.decode(ids) == RIGHT
    assert len(tokenizer) == 35
    text = tokenizer.apply_chat_template(task.prompt_of([3, 8]), add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\n3+8<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "system", "content": "sum"}, *task.prompt_of([3, 8]), {"role": "assistant", "content": "11"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert ids.count(tokenizer.eos_token_id) == 3
    assert tokenizer("3Ä+z8")["input_ids"] == tokenizer("3+8")["input_ids"]  # other characters vanish


class TestShippedModel:
    def test_files_and_model(self, shipped):
        model, tokenizer = shipped
        files = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
        assert {path.name for path in MODEL_DIR.iterdir()} == {*files.split(), "chat_template.jinja"}
        assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 1_000_000
        assert 100_000 <= sum(p.numel() for p in model.parameters()) <= 200_000
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
        assert tokenizer.chat_template == build_tokenizer().chat_template

    def test_the_shipped_model_starts_fluent_and_faulty(self, shipped):
        drawn = task.make_problems(128, "held_out")
        numbers, texts = evaluate(*shipped, drawn, sample=True)
        assert 0.15 < numbers["accuracy"] < 0.45
        assert all(text.split("\n")[-1].startswith("\\boxed{") for text in texts)
        assert numbers["process_reward"] > 0.6  # mistakes, not nonsense

    def test_build_is_reproducible(self, tmp_path):
        build = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "list_sum_model.py"))["build"]
        for name in ("first", "second"):
            build(tmp_path / name, seed=1, steps=2, batch_size=4)
        first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
        assert first == second
        build(tmp_path / "other", seed=2, steps=2, batch_size=4)
        assert (tmp_path / "other" / "model.safetensors").read_bytes() != first


class TestEvaluate:
    def test_evaluate_counts_accuracy_and_lengths(self, shipped):
        model, tokenizer = shipped
        drawn = task.make_problems(20, "held_out")
        greedy, texts = evaluate(model, tokenizer, drawn, sample=False)
        assert (greedy, texts) == evaluate(model, tokenizer, drawn, sample=False, batch_size=20)
        rewards = task.list_sum_reward(texts, [sum(numbers) for numbers in drawn])
        assert greedy["accuracy"] == sum(rewards) / 20
        lengths = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]  # the end token counts
        assert greedy["length_mean"] == pytest.approx(sum(lengths) / 20)
        right = [length for length, reward in zip(lengths, rewards, strict=True) if reward]
        assert greedy["length_correct_mean"] == pytest.approx(sum(right) / len(right))
        sampled = evaluate(model, tokenizer, drawn, sample=True, seed=5)
        assert sampled == evaluate(model, tokenizer, drawn, sample=True, seed=5)
        assert sampled[1] != evaluate(model, tokenizer, drawn, sample=True, seed=6)[1]


@pytest.fixture
def few_problems(monkeypatch):
    """Evaluations on 32 problems instead of 512."""
    monkeypatch.setattr(run, "make_problems", lambda size, *split, **terms: task.make_problems(32, *split, **terms))


class TestRun:
    @pytest.mark.usefixtures("few_problems")
    def test_two_steps_from_end_to_end(self, tmp_path, capsys):
        assert short_commands.run_demo(parse("--output_dir", str(tmp_path / "out"), "--steps", "2")) == 1
        captured = capsys.readouterr()
        assert "NOT LEARNED" in captured.out
        assert "sampled accuracy" in captured.out
        assert "from_pretrained" in captured.out
        assert "step 2/2" in captured.err
        numbers = json.loads((tmp_path / "out" / "results.json").read_text())
        assert numbers["status"] == "finished"
        assert numbers["learned"] is False
        assert numbers["settings"]["process"] is None
        assert numbers["gain_points"] == pytest.approx(
            100 * (numbers["after"]["sampled"]["accuracy"] - numbers["before"]["sampled"]["accuracy"])
        )
        saved = tmp_path / "out" / "model"
        assert {path.name for path in saved.iterdir()} == {path.name for path in MODEL_DIR.iterdir()}
        assert (saved / "model.safetensors").read_bytes() != (MODEL_DIR / "model.safetensors").read_bytes()
        shipped_config, config = (json.loads((d / "config.json").read_text()) for d in (MODEL_DIR, saved))
        assert config | {"transformers_version": shipped_config["transformers_version"]} == shipped_config
        if importlib.util.find_spec("matplotlib"):
            assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.slow
    def test_stock_trl_beside_it(self, tmp_path, monkeypatch):
        """The same prompts at the first step, another objective, both runs in one report; in the folder of an earlier
        demo, without matplotlib."""
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes its import an ImportError
        out = tmp_path / "out"
        earlier = out / "trl_grpo" / "completions" / "completions_00099.parquet"
        earlier.parent.mkdir(parents=True)
        (out / "results.json").write_text('{"made_by": "trl-drgrpo demo"}')
        for path in (earlier, out / "curves.png"):
            path.write_bytes(b"of a longer demo")
        with open(tmp_path / "log", "w", encoding="utf-8") as log:
            console = Console(file=log, width=200)
            result = run_demo(out, steps=2, eval_size=8, console=console, compare=["trl_grpo"])
        assert not earlier.exists()
        assert not (out / "curves.png").exists()
        assert 'pip install "trl-drgrpo[report]"' in (tmp_path / "log").read_text(encoding="utf-8")
        transformers.AutoModelForCausalLM.from_pretrained(out / "model")
        assert (out / "comparison.html").stat().st_size > (out / "report.html").stat().st_size > 50_000
        runs = json.loads(write_report([out, out / "trl_grpo"], tmp_path / "both.json", "json").read_text())["runs"]
        ours, grpo = (run["curves"] for run in runs)
        for name in ("completions/length_incorrect_mean", "drgrpo/all_correct_frac", "drgrpo/pass_rate"):
            assert ours[name], name
            assert grpo[name], name
        assert json.loads((out / "results.json").read_text()) == result.numbers
        assert result.numbers["stock"]["trl_grpo"]["sampled"]["length_mean"] > 20
        paces = result.numbers["pace"]
        assert list(paces) == ["DrGRPOTrainer", "trl_grpo"]
        for pace in paces.values():
            assert pace["seconds"][0] == 0  # before training
            assert pace["seconds"] == sorted(pace["seconds"])
            assert len(pace["seconds"]) == len(pace["pass_rate"]) == 3
        assert "CPU time to" in pace_sentence(result)
        assert [str(cell) for cell in objectives_table(result).columns[0].cells] == ["DrGRPOTrainer", "trl_grpo"]

    def test_the_clock_stands_still_while_a_run_is_evaluated(self):
        clock = SimpleNamespace(now=5.0)

        def measured(model):
            clock.now += 100
            return 0.5

        run = {"seconds": [], "pass_rate": []}
        pace = Pace(run, measured, every_steps=2, clock=lambda: clock.now)
        pace.on_train_begin(None, None, None, model=None)
        for step in range(1, 5):
            clock.now += 3
            pace.on_step_end(None, SimpleNamespace(global_step=step), None, model=None)
        assert run == {"seconds": [0.0, 6.0, 12.0], "pass_rate": [0.5] * 3}

    def test_accuracy_over_time_is_drawn(self, tmp_path):
        pytest.importorskip("matplotlib")
        runs = [{"seconds": [0, 2, end], "pass_rate": [0.1, 0.5, 0.7]} for end in (4, 8)]
        figure = draw_pace({"one": {"ours": runs, "theirs": runs[1:]}, "two": {"ours": runs[:1]}})
        first, second = figure.axes
        assert [len(axes.lines) for axes in figure.axes] == [2, 1]
        assert {text.get_text() for text in first.texts} == {"ours", "theirs"}
        assert not second.texts  # it has a color that is known
        assert first.lines[0].get_xdata()[-1] == 4  # as far as all runs go
        assert first.lines[0].get_color() == second.lines[0].get_color()
        assert save_figure(figure, tmp_path / "pace.png").stat().st_size > 5_000

    def test_time_to_an_accuracy(self):
        run = {"seconds": [0.0, 4.0, 6.0], "pass_rate": [0.25, 0.5, 0.25]}
        assert [reached(run, target) for target in (0.125, 0.375, 0.5, 0.625)] == [0.0, 2.0, 4.0, math.inf]

    def test_the_objectives_to_compare_with(self):
        """Without a name all of stock TRL's, the last of which is the same objective as ours."""
        assert parse("--compare").compare == []
        configs = [GRPOConfig(use_cpu=True, bf16=False, **fields) for fields in STOCK_OBJECTIVES.values()]
        assert [(c.loss_type, c.scale_rewards) for c in configs] == [
            ("dapo", "group"),
            ("grpo", "group"),
            ("dr_grpo", "group"),
            ("dr_grpo", "none"),
        ]

    @pytest.mark.usefixtures("few_problems")
    def test_interrupted_run_keeps_what_it_has(self, tmp_path, monkeypatch, ran):
        def interrupt(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(run, "_train", interrupt)
        assert str(tmp_path) in ran(["demo", "--output_dir", str(tmp_path)], 130).err
        numbers = json.loads((tmp_path / "results.json").read_text())
        assert numbers["status"] == "unfinished"
        assert numbers["before"]["greedy"]["accuracy"] > 0
        assert (tmp_path / "model" / "model.safetensors").exists()

    @pytest.mark.parametrize("name", ["results.json", "model", "curves.png", "report.html", "trl_grpo"])
    def test_files_of_another_origin_are_not_touched(self, tmp_path, name):
        (tmp_path / name).write_text("mine")
        with pytest.raises(InputError, match=f"holds {name}, not written by a demo"):
            run_demo(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "mine"

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"steps": 0}, "steps: got 0"),
            ({"seed": -1}, "seed: got -1"),
            ({"eval_size": 0}, "size: got 0"),
            ({"output_dir": __file__}, "output_dir: got .*but .* is a file"),
            ({"output_dir": "."}, "output_dir: got ., which is the current directory"),
        ],
    )
    def test_bad_settings(self, tmp_path, setting, message):
        with pytest.raises(InputError, match=message):
            run_demo(**{"output_dir": tmp_path / "out", **setting})
        assert not (tmp_path / "out").exists()

    @pytest.mark.slow
    def test_it_learns(self, tmp_path: Path):
        assert short_commands.run_demo(parse("--output_dir", str(tmp_path), "--seed", "1")) == 0
        numbers = json.loads((tmp_path / "results.json").read_text())
        assert numbers["gain_points"] >= 40
        assert numbers["after"]["greedy"]["accuracy"] > 0.85


class TestProcessRun:
    @pytest.mark.slow
    def test_it_learns(self, tmp_path, capsys):
        assert short_commands.run_demo(parse("--process", "--output_dir", str(tmp_path), "--seed", "1")) == 0
        assert "steps per completion" in capsys.readouterr().out
        numbers = json.loads((tmp_path / "results.json").read_text())
        assert numbers["settings"]["process"] == PROCESS_SETTINGS
        assert numbers["gain_points"] >= 40
        assert all(7 < numbers[stage]["sampled"]["steps_mean"] < 11 for stage in ("before", "after"))
        assert numbers["after"]["greedy"]["accuracy"] > 0.7
        assert numbers["after"]["sampled"]["process_reward"] > 0.9


def test_the_cost_of_process_rewards_is_below_two_percent():
    recipes = Path(__file__).parents[2] / "recipes"
    results = json.loads((recipes / "results" / "process_overhead.json").read_text(encoding="utf-8"))
    page = (recipes / "guides" / "process_rewards.md").read_text(encoding="utf-8")
    assert 0 < results["inside"]["step_rewards_frac"] < 0.02
    assert f"{results['inside']['step_rewards_frac']:.1%}" in page
