"""The adapters against the other stacks' own reward functions, from the packages in `foreign_stacks.txt`.

Only the modules that hold reward functions are loaded; packages whose `__init__` wants a cluster are entered past it.
"""

import asyncio
import contextlib
import importlib
import os
import sys
import types
from pathlib import Path

import pytest

from trl_drgrpo.rewards.adapters import stacks as adapters
from trl_drgrpo.rewards.contract import checked_reward
from trl_drgrpo.rewards.recipe_rewards import resolve_reward

FOLDER = Path(os.environ.get("FOREIGN_STACKS", Path(__file__).parents[4] / "build" / "foreign_stacks"))
BOXED = ["so \\boxed{\\frac{1}{2}}", "so \\boxed{\\frac{1}{3}}", "no answer"]
HALVES = ["\\frac{1}{2}"] * 3


@contextlib.contextmanager
def importable(*bare: str, **stubs: types.ModuleType):
    """The packages on the search path; those in `bare` without running their `__init__`; `stubs` stand for others."""
    if not FOLDER.is_dir():
        pytest.skip("the other stacks are not installed: see tests/foreign_stacks.txt")
    before = set(sys.modules)
    sys.path.append(str(FOLDER))
    for name in bare:
        package = types.ModuleType(name)
        package.__path__ = [str(FOLDER / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules.update({name.replace("__", "."): module for name, module in stubs.items()})
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("verl", "swift", "openrlhf", "oat", "verifiers"):
                del sys.modules[name]


def stack(module, *bare, **stubs):
    """A fixture: a module of another stack, while its package is importable."""

    @pytest.fixture
    def found():
        with importable(*bare, **stubs):
            yield importlib.import_module(module)

    return found


requests = types.ModuleType("swift.infer_engine")
requests.__dict__["InferRequest"] = dict
verl = stack("verl.utils.reward_score", "verl", "verl.utils")
orms = stack("swift.rewards.orm", "swift", "swift.rewards", swift__infer_engine=requests)
graders = stack("oat.utils.math_grader", "oat", "oat.utils")
vf = stack("verifiers")


def rows(answers):
    return {"reward_model": [{"style": "rule", "ground_truth": answer} for answer in answers]}


# verl ----------------------------------------------------------------------------------------------------------------


def test_verl_default_compute_score_dispatches_on_the_column(verl):
    reward = adapters.from_verl(verl.default_compute_score)
    texts = ["#### 72", "#### 71", "\\boxed{7}", "Answer: 7", "Answer: 8"]
    sources = ["openai/gsm8k"] * 2 + ["HuggingFaceH4/MATH-500"] + ["math_dapo"] * 2
    columns = rows(["72", "72", "7", "7", "7"])
    # math_dapo returns a dict whose score is 1 or -1
    assert reward(completions=texts, data_source=sources, **columns) == [1.0, 0.0, 1.0, 1.0, -1.0]


def test_verl_scorers_that_take_fewer_arguments(verl):
    gsm8k = importlib.import_module("verl.utils.reward_score.gsm8k")
    reward = adapters.from_verl(gsm8k.compute_score, reward_kwargs={"method": "flexible", "format_score": 0.25})
    texts = ["it is 72", "it is 71", "none"]
    assert reward(completions=texts, **rows(["72"] * 3)) == [1.0, 0.25, 0.0]


def test_verl_batch_function(verl):
    batch = importlib.import_module("verl.utils.reward_score.math_batch").compute_score_batched
    reward = adapters.from_verl(batch, data_source="HuggingFaceH4/MATH-500")
    assert reward(completions=BOXED, **rows(HALVES)) == [1.0, 0.0, 0.0]


def test_verl_function_by_its_file_in_killable_workers():
    with importable():
        path = f"{FOLDER}/verl/utils/reward_score/math_dapo.py:compute_score"
        reward = resolve_reward({"verl": {"function": path, "timeout": 30}})
        assert reward(completions=["Answer: 7", "Answer: 8"], **rows(["7", "7"])) == [1.0, -1.0]


# understand-r1-zero --------------------------------------------------------------------------------------------------


def test_graders_of_understand_r1_zero(graders):
    boxed = adapters.from_r1_zero(graders.boxed_reward_fn)
    assert boxed(completions=BOXED, answer=HALVES) == [1.0, 0.0, 0.0]
    tagged = adapters.from_r1_zero(graders.answer_tag_reward_fn, fast=False)
    texts = ["2+2</think> <answer>4</answer>", "2+2</think> <answer>5</answer>", "<answer>4</answer>"]
    assert tagged(completions=texts, answer=[4, ["3", "4"], "4"]) == [1.0, 0.0, 0.0]
    assert tagged(completions=texts[:1], answer=[["3", "4"]]) == [1.0]  # any of several


def test_a_grader_by_its_file_in_killable_workers():
    with importable():
        path = f"{FOLDER}/oat/utils/math_grader.py:boxed_reward_fn"
        reward = resolve_reward({"r1_zero": {"grader": path, "timeout": 60}})
        assert reward(completions=BOXED, answer=HALVES) == [1.0, 0.0, 0.0]


# OpenRLHF ------------------------------------------------------------------------------------------------------------


def test_openrlhf_grader_in_a_reward_func():
    import torch

    with importable("openrlhf", "openrlhf.utils"):
        maths = importlib.import_module("openrlhf.utils.math_utils")

        def reward_func(queries, prompts, labels, **kwargs):
            answers = [
                maths.extract_boxed_answer(query[len(prompt) :])
                for query, prompt in zip(queries, prompts, strict=True)
            ]
            right = [maths.grade_answer(str(answer), label) for answer, label in zip(answers, labels, strict=True)]
            scores = torch.tensor(right, dtype=torch.float)
            return {"rewards": scores, "scores": scores, "extra_logs": {"right": scores}}

        reward = checked_reward(adapters.from_openrlhf(reward_func))
        prompts = ["Not \\boxed{\\frac{1}{2}}. What then? "] * 3  # the prompt must not be graded
        assert reward(prompts=prompts, completions=BOXED, label=HALVES) == [1.0, 0.0, 0.0]


# ms-swift ------------------------------------------------------------------------------------------------------------


def test_orms_of_swift(orms):
    texts = ["<think>a</think> <answer>\\frac{1}{2}</answer>", "<answer>1/3</answer>"]
    assert adapters.from_swift(orms.Format)(completions=texts) == [1.0, 0.0]
    accuracy = adapters.from_swift(orms.orms["accuracy"])
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    solutions = ["$\\frac{1}{2}$"] * 2
    assert accuracy(completions=messages, solution=solutions) == [1.0, 0.0]
    assert accuracy.__name__ == "MathAccuracy"


def test_orms_of_swift_that_read_training_arguments(orms):
    overlong = adapters.from_swift(orms.SoftOverlong, args={"soft_max_length": 10, "soft_cache_length": 4})
    # free up to 10 - 4 = 6 tokens, then -1/4 per token
    assert overlong(completions=["", ""], completion_ids=[[0] * 6, [0] * 9]) == [0.0, -0.75]
    lengths = {"cosine_min_len_value_wrong": -1.0, "cosine_max_len_value_wrong": 0.0, "cosine_max_len": 8}
    lengths |= {"cosine_min_len_value_correct": 2.0, "cosine_max_len_value_correct": 1.0}
    cosine = adapters.from_swift(orms.CosineReward, args=lengths)
    solutions = ["$\\frac{1}{2}$"] * 2
    # cos(0) and cos(pi): right and shortest, wrong and longest
    rewards = cosine(completions=["$\\boxed{\\frac{1}{2}}$", "x"], completion_ids=[[], [0] * 8], solution=solutions)
    assert rewards == pytest.approx([2.0, 0.0])


# verifiers -----------------------------------------------------------------------------------------------------------


def states(completions, answers, prompt="q"):
    return [
        {"prompt": prompt, "completion": text, "answer": answer, "info": {}, "task": "sums", "trajectory": []}
        for text, answer in zip(completions, answers, strict=True)
    ]


def test_a_rubric_scores_as_it_does_at_home(vf):
    parser = vf.XMLParser(["think", "answer"], answer_field="answer")

    def exact(parser, completion, answer):
        return float(parser.parse_answer(completion) == answer)

    async def short(completion, **kwargs):
        return 1 - len(completion[-1]["content"]) / 100

    rubric = vf.RubricGroup(
        [vf.Rubric([exact], [2.0], parser), vf.Rubric([short, parser.get_format_reward_func()], [0.5, 0.0], parser)]
    )
    texts = ["<think>\na\n</think>\n<answer>\n4\n</answer>", "<think>\na\n</think>\n<answer>\n5\n</answer>", "4"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    metrics = {}
    reward = adapters.from_verifiers(rubric)
    given = {"prompts": ["q"] * 3, "completions": messages, "answer": ["4"] * 3, "log_metric": metrics.__setitem__}
    rewards = asyncio.run(reward(**given))
    homes = states(messages, ["4"] * 3)
    for state in homes:
        total = 0.0
        for part in rubric.rubrics:
            asyncio.run(part.score_rollout(state))
            total += state["reward"]
        state["total"] = total
    assert rewards == pytest.approx([state["total"] for state in homes])
    # 2 x exact + 0.5 x (1 - length / 100), lengths 39, 39 and 1
    assert rewards == pytest.approx([2.305, 0.305, 0.495])
    assert metrics["rewards/rubric/exact"] == pytest.approx(1 / 3)
    assert metrics["rewards/rubric/failed_frac"] == 0.0


def test_math_rubric_of_verifiers(vf):
    rubric = importlib.import_module("verifiers.rubrics.math_rubric").MathRubric()
    messages = [[{"role": "assistant", "content": text}] for text in BOXED]
    reward = adapters.from_verifiers(rubric, name="maths")
    rewards = asyncio.run(reward(prompts=["q"] * 3, completions=messages, answer=HALVES))
    asyncio.run(rubric.teardown())
    assert rewards == [1.0, 0.0, 0.0]
