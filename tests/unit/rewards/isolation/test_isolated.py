import functools
import inspect
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from misbehaving import MISDEEDS, misbehave, same
from processes import eventually, marked
from runs import logged, train

import trl_drgrpo.rewards.isolation.isolated as isolated_module
from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.rewards.columns import check_columns
from trl_drgrpo.rewards.contract import checked_reward, reward_name
from trl_drgrpo.rewards.isolation import Limits, isolate, scored_in_workers
from trl_drgrpo.rewards.isolation.pool import close_pools
from trl_drgrpo.rewards.recipe_rewards import resolve_reward
from trl_drgrpo.rewards.sample import SampleReward

QUICK = {"timeout": 1.0, "workers": 2}


@pytest.fixture(autouse=True, scope="module")
def ended_pools():
    yield
    close_pools()


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch):
    monkeypatch.setattr("trl_drgrpo.rewards.isolation.isolated._LOGGED", set())


class Metrics(list):
    """A `log_metric` that is the list of what it was given."""

    def __call__(self, name, value):
        self.append((name, value))


@pytest.fixture
def metrics():
    return Metrics()


def scores_of(score, calls, limits=Limits(**QUICK), on_error="unscorable", log_metric=None, name="f"):  # noqa: B008
    return scored_in_workers(score, calls, name=name, limits=limits, on_error=on_error, log_metric=log_metric)


def calls_of(*values):
    return [((value,), {}) for value in values]


def act(completions, **kwargs):
    return [misbehave(completion) for completion in completions]


class TestSamples:
    def test_scores_come_in_order_and_failures_are_counted(self, metrics):
        calls = calls_of(1, "hang", 3, "exit status 3", "exception", 6, None, float("nan"))
        assert scores_of(misbehave, calls, log_metric=metrics) == [1.0, None, 3.0, None, None, 6.0, None, None]
        assert metrics == [("rewards/f/failed_frac", 3 / 8)]

    @pytest.mark.parametrize("limits", [Limits(**QUICK), None])
    @pytest.mark.parametrize("nonsense", ["x", float("inf"), [1.0], {"score": 1}, len, np.ones(2), 1j])
    def test_nonsense_is_a_failure(self, metrics, limits, nonsense):
        assert scores_of(lambda value: value, calls_of(0.5, nonsense), limits, log_metric=metrics) == [0.5, None]
        assert metrics == [("rewards/f/failed_frac", 0.5)]

    @pytest.mark.parametrize("number", [1, True, np.float32(1), np.array(1), torch.tensor(1.0)])
    def test_numbers_of_all_kinds_are_floats(self, number):
        (score,) = scores_of(lambda: number, [((), {})], Limits(timeout=60, workers=1), "raise")
        assert (type(score), score) == (float, 1.0)

    @given(st.lists(st.one_of(st.floats(), st.none(), st.booleans(), st.text(max_size=3)), max_size=20))
    @settings(max_examples=20)
    def test_workers_change_no_score(self, values):
        outcomes = []
        for limits in (Limits(**QUICK), None):
            logged = {}
            scores = scores_of(lambda value: value, calls_of(*values), limits, log_metric=logged.__setitem__)
            outcomes.append((scores, logged))
        assert outcomes[0] == outcomes[1]

    def test_columns_may_have_any_name(self):
        def score(completion, name, self, function):
            return len(completion) + name + self + function

        calls = [(("abc",), {"name": 1, "self": 2, "function": 3})]
        for limits in (Limits(**QUICK), None):
            assert scores_of(score, calls, limits, "raise") == [9.0]

    @pytest.mark.parametrize("limits", [Limits(**QUICK), None])
    def test_the_first_failure_is_an_error_for_those_who_want_it(self, metrics, limits):
        message = "reward function 'f': got ZeroDivisionError: .* at completion 1"
        with pytest.raises(RewardError, match=message) as error:
            scores_of(misbehave, calls_of(1, "exception", 3), limits, "raise", metrics)
        assert "in misbehave" in str(error.value.__cause__)
        assert metrics == []

    @pytest.mark.parametrize("limits", [Limits(**QUICK), None])
    def test_one_traceback_is_logged_per_reward(self, caplog, limits):
        for name in ("f", "f", "g"):
            scores_of(misbehave, calls_of("exception", "exception"), limits, name=name)
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 2
        assert "Reward function 'f' failed for 2 of 2 completions" in errors[0]
        assert "in misbehave" in errors[0]

    def test_no_calls_start_no_process(self, metrics):
        before = psutil.Process().children()
        assert scores_of(len, [], Limits(timeout=77.0), "raise", metrics) == metrics == []
        assert psutil.Process().children() == before

    def test_a_sample_reward_in_workers(self, metrics):
        class Length(SampleReward):
            def __init__(self):
                super().__init__("length", columns=("limit",), limits=Limits(**QUICK))

            def score(self, completion, limit):
                return misbehave(completion) if completion in MISDEEDS else len(completion) / limit

        completions = ["ab", "hang", [{"role": "assistant", "content": "abcd"}]]
        for reward in (Length(), cloudpickle.loads(cloudpickle.dumps(Length()))):
            scores = reward(completions=completions, limit=[4, 4, 8], prompts=["p"] * 3, log_metric=metrics)
            assert scores == [0.5, 0.0, 0.5]
        assert metrics == [("rewards/length/failed_frac", 1 / 3)] * 2


class TestIsolate:
    def test_rows_are_scored_one_at_a_time(self, metrics):
        def rows(prompts, completions, completion_ids, answer, constant, **kwargs):
            sizes = {len(prompts), len(completions), len(completion_ids), len(answer)}
            return [misbehave(completions[0]) if completions[0] in MISDEEDS else float(sizes == {1}) * constant]

        rewards = isolate(rows, **QUICK)(
            prompts=["p"] * 4,
            completions=["a", "exit status 3", "hang", "b"],
            completion_ids=[[1], [2], [3], [4, 5]],
            answer=list("wxyz"),
            constant=3,
            log_metric=metrics,
        )
        assert rewards == [3.0, None, None, 3.0]
        assert metrics == [("rewards/rows/failed_frac", 0.5)]

    def test_failing_costs_what_the_user_says_or_the_function_declares(self, caplog):
        completions = [2, "exception", "hang", 3]
        assert isolate(act, failed=-1, **QUICK)(completions=completions) == [2.0, -1.0, -1.0, 3.0]
        assert "failing costs the policy nothing" not in caplog.text
        isolated_module._LOGGED.clear()
        for _ in range(2):
            assert isolate(act, **QUICK)(completions=completions) == [2.0, None, None, 3.0]
        assert caplog.text.count("failing costs the policy nothing") == 1

        def declares(completions, **kwargs):
            return act(completions)

        declares.lowest_reward = -2.0
        assert isolate(declares, **QUICK)(completions=completions) == [2.0, -2.0, -2.0, 3.0]
        assert isolate(functools.partial(declares), **QUICK).lowest_reward == -2.0

    def test_a_row_that_nobody_could_judge_is_none_whatever_failing_costs(self):
        reward = isolate("numeric_reward", failed=-1, **QUICK)
        assert reward(completions=["2", "2"], answer=["2", "two"]) == [1.0, None]
        assert isolate("numeric_reward").lowest_reward == 0.0

    def test_a_single_row_is_no_special_case(self):
        assert isolate(same, **QUICK)(completions=["a"], answer=["a"]) == [1.0]
        assert isolate(same, **QUICK)(completions=[], answer=[]) == []

    @pytest.mark.parametrize("output", [[1.0, 2.0], [], 1.0, None, "x", ["x"], [float("inf")]])
    def test_a_broken_contract_costs_its_row(self, output):
        def broken(completions, **kwargs):
            return output if completions[0] == "b" else [1.0]

        assert isolate(broken, **QUICK)(completions=["a", "b", "c"]) == [1.0, None, 1.0]

    def test_name_and_signature_are_those_of_the_function(self):
        isolated = isolate(same)
        assert reward_name(isolated) == "same"
        assert inspect.signature(isolated) == inspect.signature(same)
        check_columns(isolated, ["prompt", "answer"], "same")
        with pytest.raises(InputError, match="a column 'answer', which the function requires"):
            check_columns(isolated, ["prompt"], "same")

    def test_the_wrapper_travels_itself(self):
        isolated = cloudpickle.loads(cloudpickle.dumps(isolate(same, **QUICK)))
        assert isolated(completions=["a", "b"], answer=["a", "a"]) == [1.0, 0.0]

    def test_metrics_of_workers_are_logged_in_the_parent(self, metrics):
        def logs(completions, log_metric, log_extra, **kwargs):
            log_metric("rewards/logs/length", len(completions[0]))
            if completions[0] != "quiet":
                log_extra("upper", [completion.upper() for completion in completions])
            return [misbehave(completion) if completion in MISDEEDS else 1.0 for completion in completions]

        extras = []
        isolate(logs, **QUICK)(
            completions=["quiet", "ab", "exit status 3", "c", "quiet"],
            log_metric=metrics,
            log_extra=lambda column, values: extras.append((column, values)),
        )
        assert extras == [("upper", [None, "AB", None, "C", None])]
        lengths = [("rewards/logs/length", float(n)) for n in (5, 2, 1, 5)]
        assert metrics == [("rewards/logs/failed_frac", 0.2), *lengths]

    def test_the_trainer_state_arrives_without_its_history(self):
        from transformers import TrainerState

        def schedule(completions, trainer_state, **kwargs):
            return [trainer_state.global_step / trainer_state.max_steps - hasattr(trainer_state, "log_history")]

        state = TrainerState(global_step=5, max_steps=20, log_history=[{"lock": threading.Lock()}])
        assert isolate(schedule, **QUICK)(completions=["a"], trainer_state=state) == [0.25]
        assert isolate(same, **QUICK)(completions=["a"], answer=["a"], trainer_state=None) == [1.0]

    def test_asynchronous_rewards(self):
        async def later(completions, **kwargs):
            import asyncio

            await asyncio.sleep(60 if completions[0] == "hang" else 0)
            return [1.0]

        assert isolate(later, **QUICK)(completions=["a", "hang", "b"]) == [1.0, None, 1.0]
        assert not inspect.iscoroutinefunction(isolate(later))

    def test_errors_for_those_who_want_them(self):
        with pytest.raises(RewardError, match="reward function 'act': got no result within 1 s at completion 1"):
            isolate(act, on_error="raise", **QUICK)(completions=[1, "hang"])

    def test_failures_are_counted_once_behind_the_contract(self, metrics):
        checked = checked_reward(isolate(act, **QUICK), "unscorable")
        assert checked(completions=[1, "exit status 3", 2, 3], log_metric=metrics) == [1.0, None, 2.0, 3.0]
        assert metrics == [("rewards/act/failed_frac", 0.25)]

    def test_a_reward_that_cannot_be_sent_to_a_worker_is_refused_at_once(self):
        lock = threading.Lock()

        def guarded(completions, **kwargs):
            with lock:
                return [1.0]

        with pytest.raises(InputError, match=r"'guarded': got one that cannot be sent to a worker .* \(TypeError"):
            isolate(guarded)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions, **kwargs):
        return [self.factor * len(completion) for completion in completions]

    def method(self, completions, **kwargs):
        return self(completions)


def scale(completions, factor, **kwargs):
    return [factor * len(completion) for completion in completions]


FILE = """
import threading
from dataclasses import dataclass

lock = threading.Lock()  # keeps the functions here from being sent by value

@dataclass
class Scale:
    factor: float

    def __call__(self, completions, **kwargs):
        return [self.factor * len(c) for c in completions]

def scale(completions, **kwargs):
    with lock:
        return [2.0 * len(c) for c in completions]

instance = Scale(2.0)
"""


class TestWhereFunctionsComeFrom:
    @pytest.mark.parametrize(
        "reward",
        [
            Scaled(2.0),
            Scaled(2.0).method,
            functools.partial(scale, factor=2.0),
            lambda completions, **kwargs: [2.0 * len(completion) for completion in completions],
            functools.partial(Scaled(2.0)),
        ],
        ids=["instance", "method", "partial", "lambda", "partial of an instance"],
    )
    def test_isolate_takes_callables(self, reward):
        assert isolate(reward, timeout=30)(completions=["a", "bc"]) == [2.0, 4.0]

    @pytest.mark.parametrize("attribute", ["scale", "instance"])
    @pytest.mark.parametrize("form", ["spec", "callable"])
    def test_isolate_takes_objects_of_files(self, tmp_path, monkeypatch, attribute, form):
        (tmp_path / "mine.py").write_text(FILE)
        monkeypatch.chdir(tmp_path)
        reward = f"mine.py:{attribute}"
        isolated = isolate(reward if form == "spec" else resolve_reward(reward), **QUICK)
        monkeypatch.chdir("/")
        assert isolated(completions=["a", "bc"]) == [2.0, 4.0]

    def test_functions_of_files_inside_something_else(self, tmp_path):
        (tmp_path / "mine.py").write_text(FILE)
        inner = resolve_reward(f"{tmp_path}/mine.py:scale")

        def doubled(completions, **kwargs):
            return [2 * reward for reward in inner(completions)]

        assert isolate(doubled, **QUICK)(completions=["a", "bc"]) == [4.0, 8.0]

    def test_modules_that_only_this_process_knows(self, tmp_path):
        import importlib.util

        source = FILE.replace("threading.Lock", "contextlib.nullcontext").replace("threading", "contextlib")
        (tmp_path / "unknown_to_others.py").write_text(source)
        spec = importlib.util.spec_from_file_location("unknown_to_others", tmp_path / "unknown_to_others.py")
        module = sys.modules["unknown_to_others"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for reward in (module.scale, module.instance, functools.partial(module.scale)):
            assert isolate(reward, **QUICK)(completions=["a", "bc"]) == [2.0, 4.0]

    def test_isolate_takes_rewards_by_name(self):
        isolated = isolate("misbehaving.same", timeout=30)
        assert isolated.__name__ == "same"
        assert isolated(completions=["a", "b"], answer=["a", "a"]) == [1.0, 0.0]
        completions = [[{"role": "assistant", "content": text}] for text in ("<think>\nx\n</think>\ny", "y")]
        assert isolate("think_format_reward", timeout=60)(completions=completions) == [1.0, 0.0]


SCRIPT = """
import os, sys, time
from trl_drgrpo.rewards.isolation import isolate

print("the script runs", flush=True)

class Rule:
    factor = 2.0

def reward(completions, **kwargs):
    if completions[0] == "hang":
        import subprocess
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        time.sleep(600)
    return [Rule.factor * len(c) for c in completions]

isolated = isolate(reward, timeout={timeout}, workers=2)
print(isolated(completions=["a", "bc", "def"]), flush=True)
{rest}
"""


def start(tmp_path, rest="", timeout=60):
    """A training script as they are: without `if __name__ == "__main__"`."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(rest=rest, timeout=timeout))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MARK": str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )


def leaves_nothing(tmp_path, process):
    """Whether no process of the script's environment outlives it."""
    return eventually(lambda: not marked(str(tmp_path)) - {process.pid})


class TestScripts:
    def test_a_script_without_a_guard_runs_once_and_leaves_nothing(self, tmp_path):
        process = start(tmp_path)
        output, _ = process.communicate(timeout=120)
        assert output.splitlines() == ["the script runs", "[2.0, 4.0, 6.0]"]
        assert process.returncode == 0
        assert leaves_nothing(tmp_path, process)

    def test_trainer_processes_on_one_machine_do_not_meet(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        folders = [tmp_path / "rank 0", tmp_path / "rank 1"]
        for folder in folders:
            folder.mkdir()
        processes = [start(folder, 'print(isolated(completions=["x"] * 500) == [2.0] * 500)') for folder in folders]
        for folder, process in zip(folders, processes, strict=True):
            output, _ = process.communicate(timeout=120)
            assert output.splitlines()[1:] == ["[2.0, 4.0, 6.0]", "True"]
            assert leaves_nothing(folder, process)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    def test_no_worker_outlives_a_script_that_is_ended_from_outside(self, tmp_path, number):
        rest = 'isolated(completions=["hang", "hang"])'
        process = start(tmp_path, rest)
        assert [process.stdout.readline() for _ in range(2)] == ["the script runs\n", "[2.0, 4.0, 6.0]\n"]
        # script, nursery, 3 workers, 2 sleepers
        assert eventually(lambda: len(marked(str(tmp_path))) == 7, patience=60)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == -number
        assert leaves_nothing(tmp_path, process)

    def test_an_interrupted_call_leaves_workers_that_work(self, tmp_path):
        rest = """
try:
    print("now", flush=True)
    isolated(completions=["hang", "hang"])
except KeyboardInterrupt:
    print(isolated(completions=["a", "bc", "def"]), flush=True)
"""
        process = start(tmp_path, rest)
        assert [process.stdout.readline() for _ in range(3)][-1] == "now\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "[2.0, 4.0, 6.0]\n"
        assert process.returncode == 0

    def test_a_forked_child_has_workers_of_its_own(self, tmp_path):
        rest = """
if os.fork() == 0:
    print(isolated(completions=["child"]), flush=True)
    os._exit(0)
os.wait()
print(isolated(completions=["parent"]), flush=True)
"""
        process = start(tmp_path, rest)
        output, _ = process.communicate(timeout=120)
        assert output.splitlines()[2:] == ["[10.0]", "[12.0]"]
        assert leaves_nothing(tmp_path, process)


def test_training_goes_on_where_a_reward_hangs(tokenizer, prompts, settings):
    from trl_drgrpo import DrGRPOTrainer

    def reward(completions, answer, **kwargs):
        if int(answer[0]) % 2:
            time.sleep(600)
        return [float(len(completion)) for completion in completions]

    isolated = isolate(reward, timeout=0.1, workers=2)
    trainer = train(DrGRPOTrainer, {**settings, "max_steps": 4}, prompts, tokenizer, isolated)
    failed = logged(trainer, "rewards/reward/failed_frac")
    assert len(failed) == 4
    assert {0.0, 0.5, 1.0} >= set(failed)
    assert set(failed) != {0.0}
