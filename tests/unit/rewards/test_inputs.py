"""What is refused before a model loads: each setting once, by its field, what it got and what was expected."""

import math

import pytest
import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.adapters import (
    from_openrlhf,
    from_r1_zero,
    from_reasoning_gym,
    from_swift,
    from_trl,
    from_verifiers,
    from_verl,
)
from trl_drgrpo.rewards.combine import cached, clipped, gated, weighted_sum
from trl_drgrpo.rewards.functions.code import CodeReward, Sandbox
from trl_drgrpo.rewards.functions.mathematics import MathReward
from trl_drgrpo.rewards.functions.strings import (
    ChoiceReward,
    ExactMatchReward,
    FormatReward,
    JsonSchemaReward,
    NumericReward,
    RegexReward,
    exact_match_reward,
    length_penalty,
    overlong_penalty,
    repetition_penalty,
)
from trl_drgrpo.rewards.isolation import Limits, isolate
from trl_drgrpo.rewards.sample import SampleReward


def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...
async def later(queries, prompts, labels): ...


REFUSED = [
    # Strings
    (lambda: ExactMatchReward(where="box"), "where: got 'box'; expected one of 'answer', 'marked', 'whole'"),
    (lambda: ExactMatchReward(whitespace="trim"), "whitespace: got 'trim'"),
    (lambda: NumericReward(abs_tol=-1), "abs_tol: got -1; expected a number of at least 0"),
    (lambda: NumericReward(rel_tol=float("nan")), "rel_tol: got nan"),
    (lambda: NumericReward(thousands=";"), "thousands: got ';'"),
    (lambda: ChoiceReward(letters=""), "letters: got"),
    (lambda: ChoiceReward(letters="A"), "letters: got"),
    (lambda: ChoiceReward(letters="AA"), "letters: got"),
    (lambda: ChoiceReward(letters="abc"), "letters: got"),
    (lambda: ChoiceReward(letters="A1"), "letters: got"),
    (lambda: FormatReward(think_tag="<think>"), "think_tag: got '<think>'; expected the name of a tag"),
    (lambda: FormatReward(answer_tag=""), "answer_tag: got ''"),
    (lambda: FormatReward(think_opened="yes"), "think_opened: got 'yes'; expected 'auto', True or False"),
    (lambda: RegexReward("("), r"pattern: got '\(' \(missing \)"),
    (lambda: RegexReward(None), "pattern: got None"),
    (lambda: RegexReward("a", timeout=0), "timeout: got 0"),
    (
        lambda: JsonSchemaReward({"type": "text"}),
        "schema: got a schema with 'text' is not valid .* at type; expected a JSON Schema",
    ),
    (lambda: JsonSchemaReward({}, column="schema"), "schema: got a schema and a column of schemas"),
    (lambda: repetition_penalty(0), "ngram_size: got 0; expected a whole number, at least 1"),
    (lambda: repetition_penalty(3, 1.0), "max_penalty: got 1.0; expected a finite number, at most 0"),
    (lambda: repetition_penalty(3, float("nan")), "max_penalty: got nan"),
    (lambda: overlong_penalty(0, 0), "max_completion_length: got 0"),
    (lambda: overlong_penalty(10, 11), "soft_tokens: got 11; expected at most max_completion_length=10"),
    (lambda: overlong_penalty(10.5, 1), "max_completion_length: got 10.5"),
    (lambda: length_penalty(10, 10), "limit_tokens: got 10; expected more than free_tokens=10"),
    (lambda: length_penalty(-1, 10), "free_tokens: got -1"),
    (lambda: length_penalty(1, 10, 0.5), "max_penalty: got 0.5"),
    # Mathematics and code
    (
        lambda: MathReward(answer_format="box"),
        r"^answer_format: got 'box'; expected one of auto, boxed.* Did you mean 'boxed'\?",
    ),
    (lambda: MathReward(answer_format=None), "^answer_format: got None"),
    (lambda: MathReward(answer_column=""), "^answer_column: got ''; expected the name of a dataset column"),
    (lambda: MathReward(answer_column="completions"), "^answer_column: got 'completions'"),
    (lambda: MathReward(answer_column=3), "^answer_column: got 3"),
    (lambda: CodeReward(timeout=0), "timeout: got timeout=0 and total_timeout=30"),
    (
        lambda: CodeReward(timeout=40.0),
        "timeout: got timeout=40.0 and total_timeout=30.0; expected 0 < timeout <= total_timeout",
    ),
    (lambda: CodeReward(total_timeout=math.inf), "timeout: got"),
    (lambda: CodeReward(timeout=math.nan), "timeout: got"),
    (lambda: CodeReward(tolerance=-1.0), "tolerance: got -1.0"),
    (lambda: CodeReward(workers=0), "workers: got 0"),
    (lambda: CodeReward(on_error="ignore"), "on_error: got 'ignore'"),
    (lambda: CodeReward(sandbox="nsjail"), "sandbox: got 'nsjail'"),
    (lambda: CodeReward(sandbox=None), "sandbox: got None"),
    (lambda: Sandbox(kind="docker"), 'sandbox: got \'docker\'; expected "bwrap" or "none"'),
    (lambda: Sandbox(memory_mb=1), "memory_mb: got 1; expected at least 64"),
    (lambda: Sandbox(disk_mb=0), "disk_mb: got 0; expected at least 1"),
    (lambda: Sandbox(threads=0), "threads: got 0; expected at least 1"),
    (lambda: Sandbox(python="/nowhere/python"), "python: got '/nowhere/python'"),
    # Around other rewards
    (lambda: weighted_sum([]), "parts: got .*; expected pairs"),
    (lambda: weighted_sum([exact_match_reward]), "expected pairs of a reward function and a weight"),
    (lambda: weighted_sum([(exact_match_reward, "much")]), r"parts\[0\]: got 'much'; expected a finite number"),
    (lambda: weighted_sum([(exact_match_reward, float("inf"))]), "expected a finite number"),
    (lambda: weighted_sum([(exact_match_reward, True)]), "expected a finite number"),
    (lambda: weighted_sum([(exact_match_reward, 1), (exact_match_reward, 2)]), "two parts called exact_match_reward"),
    (lambda: weighted_sum([(3, 1)]), r"parts\[0\]: got 3; expected a reward function"),
    (lambda: weighted_sum([(JsonSchemaReward, 1)]), "the class or model JsonSchemaReward"),
    (lambda: weighted_sum([("no_such_reward", 1)]), r"parts\[0\]: got 'no_such_reward'; expected one of"),
    (lambda: gated(exact_match_reward, else_value=float("nan")), "else_value: got nan"),
    (lambda: gated(exact_match_reward, at_least="1"), "at_least: got '1'"),
    (lambda: gated(torch.nn.Linear(1, 1)), "List a reward model in reward_funcs"),
    (lambda: clipped(exact_match_reward, 1, 0), "high: got 0; expected more than low=1"),
    (lambda: clipped(exact_match_reward, low=10**400), "low: got"),
    (lambda: cached(exact_match_reward, max_entries=0), "max_entries: got 0"),
    (lambda: cached(exact_match_reward, max_entries=-1), "max_entries: got -1"),
    (lambda: cached(exact_match_reward, max_entries=1.5), "max_entries: got 1.5"),
    (lambda: cached(exact_match_reward, max_entries=True), "max_entries: got True"),
    (lambda: weighted_sum([(exact_match_reward, 1)], name=""), "name: got"),
    (lambda: weighted_sum([(exact_match_reward, 1)], name=5), "name: got"),
    (lambda: isolate(3), "reward: got 3; expected a function"),
    (lambda: isolate(SampleReward), "reward: got the class SampleReward; expected a function"),
    (lambda: isolate("no_such"), "reward: got 'no_such'; expected one of"),
    (lambda: isolate(exact_match_reward, failed="0"), "failed: got '0'"),
    (
        lambda: isolate(exact_match_reward, failed=0.0, batched=True),
        "failed: got 0.0 with batched=True; expected None",
    ),
    (lambda: isolate(exact_match_reward, timeout=0), "timeout: got 0; expected a finite number, above 0"),
    (
        lambda: isolate(exact_match_reward, on_error="ignore"),
        'on_error: got \'ignore\'; expected "unscorable" or "raise"',
    ),
    (lambda: isolate(exact_match_reward, batched="yes please"), "batched: got 'yes please'; expected true or false"),
    (lambda: Limits(timeout=0), "^timeout: got 0; expected a finite number, above 0 and at most 1000000"),
    (lambda: Limits(timeout=float("inf")), "^timeout: got inf; expected a finite number, above 0 and at most 1000000"),
    (lambda: Limits(timeout=float("nan")), "^timeout: got nan; expected a finite number, above 0 and at most 1000000"),
    (lambda: Limits(timeout="5"), "^timeout: got '5'; expected a finite number, above 0 and at most 1000000"),
    (lambda: Limits(timeout=True), "^timeout: got True; expected a finite number, above 0 and at most 1000000"),
    (lambda: Limits(memory_mb=1), "^memory_mb: got 1; expected a whole number, at least 64"),
    (lambda: Limits(memory_mb="4G"), "^memory_mb: got '4G'; expected a whole number, at least 64"),
    (lambda: Limits(workers=0), "^workers: got 0; expected a whole number, at least 1"),
    (lambda: Limits(workers=1.5), "^workers: got 1.5; expected a whole number, at least 1"),
    (lambda: Limits(calls_per_worker=0), "^calls_per_worker: got 0; expected a whole number, at least 1"),
    (lambda: Limits(calls_per_worker=None), "^calls_per_worker: got None; expected a whole number, at least 1"),
    (lambda: Limits(timeout=1e300), "timeout: got "),
    (lambda: Limits(timeout=10**400), "timeout: got "),
    (lambda: Limits(timeout=10**5000), "timeout: got "),
    (lambda: Limits(memory_mb=2**45), "memory_mb: got "),
    (lambda: Limits(memory_mb=10**20), "memory_mb: got "),
    (lambda: Limits(workers=10**9), "workers: got "),
    (lambda: Limits(workers=True), "workers: got "),
    (lambda: Limits(workers=2.0), "workers: got "),
    (lambda: Limits(memory_mb=10**5000), "memory_mb: got "),
    (lambda: SampleReward("equal", limits=5), "limits: got 5; expected Limits"),
    (lambda: SampleReward(""), "name: got ''"),
    (lambda: SampleReward(5), "name: got 5"),
    (lambda: SampleReward("equal", [5]), "column: got 5"),
    (lambda: SampleReward("equal", ["my column"]), "column: got 'my column'"),
    (lambda: SampleReward("equal", ["completions"]), "column: got 'completions'"),
    (lambda: SampleReward("equal", on_error=["raise"]), "on_error: got"),
    # Adapters
    (lambda: from_verl(compute_score, timeout=0), "timeout: got 0; expected a finite number, above 0"),
    (lambda: from_verl(compute_score, timeout=True), "timeout: got True"),
    (lambda: from_verl(compute_score, on_error="skip"), "on_error: got 'skip'"),
    (lambda: from_verl(lambda answer, **kw: 1), "needs answer; expected a function of data_source, "),
    (lambda: from_verl(lambda solution_strs: [1], timeout=3), "timeout: got 3 for a batch function"),
    (lambda: from_verl(3), "function: got int 3; expected a function, or the path of one"),
    (lambda: from_verl("no_such_module.f"), "function: got 'no_such_module.f', whose module"),
    (lambda: from_openrlhf(later), "function: got later, which is async"),
    (lambda: from_openrlhf(compute_score, timeout=1), "timeout: got 1 for a batch function"),
    (lambda: from_swift(compute_score, args={"a": 1}), "args: got .*; expected none for an instance"),
    (lambda: from_verifiers([compute_score], parser="P"), "parser: got 'P'; expected a path"),
    (lambda: from_verifiers([]), "weights: got 0 weights; expected at least one function"),
    (lambda: from_verifiers([compute_score], weights=[1, 2]), "weights: got 2 weights; expected 1, one per"),
    (lambda: from_verifiers(lambda states: [1.0]), "which takes states; expected functions that score"),
    (lambda: from_trl(compute_score, completions_as="chat"), 'got \'chat\'; expected "messages" or "text"'),
    (lambda: from_r1_zero("oat"), "grader: got 'oat'"),
    (lambda: from_reasoning_gym("chain_sums"), "task: got 'chain_sums'.* Did you mean chain_sum"),
    (lambda: from_reasoning_gym(7), "task: got 7"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_setting_that_does_not_fit_is_named(build, message):
    with pytest.raises(InputError, match=message):
        build()
