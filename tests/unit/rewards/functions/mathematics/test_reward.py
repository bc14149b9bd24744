import subprocess
import sys
import threading

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.functions.mathematics import MathReward, math_reward


@pytest.fixture
def here():
    """The reward without workers."""
    return MathReward(limits=None)


def score(reward, completion, gold):
    return reward(completions=[completion], solution=[gold])[0]


def test_a_completion_that_never_leaves_its_reasoning():
    opened = MathReward(think_opened=True, limits=None)
    assert score(opened, r"so \boxed{5}", "5") == 0.0
    assert score(opened, r"so 5</think> \boxed{5}", "5") == 1.0


def test_trl_scores_the_same_answer_zero():
    # The gap this reward closes; when this fails, TRL has closed it too.
    from trl.rewards import accuracy_reward

    completions = [[{"role": "assistant", "content": r"\boxed{0.0000674}"}]]
    assert accuracy_reward(completions, [r"$0.0000672$"]) == [1.0]
    assert MathReward(limits=None)(completions=completions, solution=["0.0000672"]) == [0.0]


def test_the_place_of_the_answer_is_an_option():
    text = r"<answer>2</answer> \boxed{1}" + "\n#### 3"
    for place, answer in {"auto": "1", "boxed": "1", "tags": "2", "final_line": "3"}.items():
        reward = MathReward(place, limits=None)
        assert reward(completions=[text] * 3, solution=["1", "2", "3"]) == [float(answer == gold) for gold in "123"]


def test_another_column():
    reward = MathReward(answer_column="answer", limits=None)
    assert reward(completions=[r"\boxed{2}"], answer=["2"], solution=["3"]) == [1.0]


def test_a_missing_package_is_named(monkeypatch):
    reward = MathReward(limits=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for needs_it in (reward.check, lambda: reward.at_sight(r"\boxed{x+1}", solution="1+x")):
        with pytest.raises(InputError, match=r"math-verify.*pip install \"trl-drgrpo\[math\]\""):
            needs_it()
    assert reward(completions=[r"\boxed{2}"], solution=["2"]) == [1.0]


def test_only_algebra_goes_to_the_workers_and_the_share_is_one_of_the_call(monkeypatch):
    sent, metrics = [], []

    def workers(score, calls, *, name, log_metric, failed, **settings):
        sent.extend(calls)
        if calls:
            log_metric(f"rewards/{name}/failed_frac", 1 / len(calls))
        return [failed, *(score(*args, **kwargs) for args, kwargs in calls[1:])][: len(calls)]

    monkeypatch.setattr("trl_drgrpo.rewards.sample.scored_in_workers", workers)
    completions = [r"\boxed{1}", r"\boxed{x+\sqrt{2}}", r"\boxed{3}", r"\boxed{y+x}", "none"]
    golds = ["1", r"\sqrt{2}+x+0", "4", "x+y", "x"]
    rewards = math_reward(
        completions=completions, solution=golds, log_metric=lambda name, value: metrics.append((name, value))
    )
    assert rewards == [1.0, 0.0, 0.0, 1.0, 0.0]  # a failure is no way out of a wrong answer
    assert [call[0][0] for call in sent] == [completions[1], completions[3]]
    assert metrics == [("rewards/math_reward/failed_frac", 1 / 5)]


def test_math_reward_runs_in_any_thread(here):
    found = []
    thread = threading.Thread(target=lambda: found.append(score(here, r"\boxed{(x+1)^2}", "x^2+2x+1")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_a_worker_loads_sympy_before_its_first_completion():
    code = "import sys; from trl_drgrpo.rewards import math_reward as m; assert 'sympy' not in sys.modules; "
    code += "m(completions=['#### 1'], solution=['1']); assert 'sympy' not in sys.modules; "
    code += "m.warm_up(); assert 'sympy' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_hostile_completions_cost_themselves_only():
    hostile = [r"\boxed{9^{9^{9}}}", r"\boxed{9999999!}", r"\boxed{" + "{" * 100_000, r"\boxed{" + "(" * 900 + "}"]
    right = [r"\boxed{\frac{1}{\sqrt{3}}}", r"\boxed{\frac{\sqrt3}{3}}"]
    rewards = math_reward(completions=hostile + right, solution=[r"\frac{\sqrt{3}}{3}"] * 6)
    assert rewards == [0.0] * 4 + [1.0] * 2
