"""Process rewards on the demo task: the rule on lines, numbers about steps, and `trl-drgrpo demo --process`."""

import argparse
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_drgrpo.cli import demo as demo_command
from trl_drgrpo.demo import task
from trl_drgrpo.demo.task import IM_END, PROCESS_SETTINGS, build_tokenizer, line_is_right, line_reward, step_numbers
from trl_drgrpo.process_rewards.steps import step_segmenter

problems = st.lists(st.integers(1, 9), min_size=2, max_size=8)

RIGHT = "3+8=11\n11+5=16\nok 11+5=16\n16+2=18\n\\boxed{18}"


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

    @given(problems, st.integers(0, 2**32))
    def test_lines_of_the_demonstrator_get_the_verdicts_of_check_steps(self, numbers, seed):
        text = task.demonstrate(numbers, random.Random(seed))
        lines = zip(text.split("\n"), task.check_steps(numbers, text), strict=True)
        assert rewards_of(text + IM_END, tuple(numbers)) == [
            None if right and line.startswith("ok ") else float(right) for line, right in lines
        ]

    @given(problems, st.text(alphabet="0123456789+=ok \n\\boxed{}", max_size=60))
    def test_any_text_gets_one_reward_per_step_and_all_verdicts(self, numbers, text):
        scored = [reward for reward in rewards_of(text + IM_END, tuple(numbers)) if reward is not None]
        lines = filter(None, map(str.strip, text.split("\n")))
        assert scored == [
            float(right)
            for line, right in zip(lines, task.check_steps(numbers, text), strict=True)
            if not (right and line.startswith("ok "))
        ]


class TestStepNumbers:
    def test_golden(self):
        # 5 lines, all right, one of them `ok`; 2 lines, one right.
        numbers = step_numbers([(3, 8, 5, 2), (3, 8)], [RIGHT, "3+8=1\n\n\\boxed{1}"])
        assert numbers == {"steps_mean": 3.5, "process_reward": 6 / 7, "ok_steps_frac": 1 / 7}

    def test_nothing(self):
        assert set(step_numbers([(3, 8)], [""]).values()) == {0.0}
        assert set(step_numbers([], []).values()) == {0.0}

    def test_one_completion_per_problem(self):
        with pytest.raises(ValueError, match="argument"):
            step_numbers([(3, 8)], [])


class TestRun:
    def parse(self, *arguments: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        demo_command.add_arguments(parser)
        return parser.parse_args(arguments)

    @pytest.mark.slow
    def test_two_steps_from_end_to_end(self, tmp_path, capsys):
        assert demo_command.run(self.parse("--process", "--output_dir", str(tmp_path), "--steps", "2")) == 1
        assert "steps per completion" in capsys.readouterr().out
        numbers = json.loads((tmp_path / "results.json").read_text())
        assert numbers["settings"]["process"] == PROCESS_SETTINGS
        assert numbers["curves"]["step"] == [1, 2]
        for curve, low, high in (("steps_mean", 7, 11), ("process_reward", 0.5, 0.95)):
            assert all(low < value < high for value in numbers["curves"][curve])
        for stage in ("before", "after"):
            assert 7 < numbers[stage]["sampled"]["steps_mean"] < 11

    @pytest.mark.slow
    def test_the_plain_demo_says_nothing_of_steps(self, tmp_path, capsys):
        from trl_drgrpo.demo.run import run_demo

        result = run_demo(tmp_path, steps=1, eval_size=8)
        numbers = json.loads((tmp_path / "results.json").read_text())
        assert numbers["settings"]["process"] is None
        assert "process_reward" not in result.curves

    @pytest.mark.slow
    def test_it_learns(self, tmp_path):
        assert demo_command.run(self.parse("--process", "--output_dir", str(tmp_path), "--seed", "1")) == 0
        numbers = json.loads((tmp_path / "results.json").read_text())
        assert numbers["gain_points"] >= 40
        assert numbers["after"]["greedy"]["accuracy"] > 0.7
        assert numbers["after"]["sampled"]["process_reward"] > 0.9


class TestEvidence:
    """The page and the numbers it stands on."""

    ROOT = Path(__file__).parents[3]
    PAGE = ROOT / "recipes" / "guides" / "process_rewards.md"

    def test_the_cost_is_below_two_percent(self):
        results = json.loads((self.ROOT / "recipes" / "results" / "process_overhead.json").read_text(encoding="utf-8"))
        assert 0 < results["inside"]["step_rewards_frac"] < 0.02
        assert f"{results['inside']['step_rewards_frac']:.1%}" in self.PAGE.read_text(encoding="utf-8")
