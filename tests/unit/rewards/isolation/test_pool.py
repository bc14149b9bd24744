import contextlib
import functools
import gc
import hashlib
import os
import pickle
import sys
import threading
import time
import types

import cloudpickle
import misbehaving
import psutil
import pytest
from processes import gone, running

import trl_drgrpo.rewards.isolation.pool as pool_module
from trl_drgrpo.rewards.contract import Limits
from trl_drgrpo.rewards.isolation.nursery import WorkerHandle
from trl_drgrpo.rewards.isolation.pool import Failure, WorkerPool, close_pools, pool_for


def calls(*arguments):
    return [((argument,), {}) for argument in arguments]


@pytest.fixture(scope="module")
def shared_pool():
    pool = WorkerPool(Limits(timeout=1.0, memory_mb=128, workers=2))
    yield pool
    pool.close()


@pytest.fixture
def new_pool():
    with contextlib.ExitStack() as stack:
        yield lambda **limits: stack.enter_context(contextlib.closing(WorkerPool(Limits(**{"workers": 2, **limits}))))


MISBEHAVE = pickle.dumps(misbehaving.misbehave)


@pytest.mark.parametrize("misdeed", misbehaving.MISDEEDS)
def test_a_misdeed_costs_its_call_only(shared_pool, misdeed):
    outcomes = shared_pool.run(MISBEHAVE, calls(0, misdeed, 2, 3, misdeed, 5))
    assert [outcome for outcome in outcomes if not isinstance(outcome, Failure)] == [0, 2, 3, 5]
    for outcome in (outcomes[1], outcomes[4]):
        assert isinstance(outcome, Failure)
        assert outcome.reason.startswith(misbehaving.MISDEEDS[misdeed][1]), outcome.reason
        assert len(outcome.reason) + len(outcome.traceback) < 20_000


def test_arguments_that_do_not_travel_cost_their_call_only(shared_pool):
    no_pickle = "arguments that do not pickle (TypeError: cannot pickle '_thread.lock' object)"
    for argument, reason in ((threading.Lock(), no_pickle), (misbehaving.Unreadable(), "ValueError: invalid literal")):
        first, second, third = shared_pool.run(MISBEHAVE, calls(1, argument, 3))
        assert (first, third) == (1, 3)
        assert second.reason.startswith(reason)


def test_a_result_that_only_the_worker_knows_costs_its_call_only(shared_pool):
    def stranger(defines):
        if not defines:
            return 1
        module = sys.modules["only_there"] = types.ModuleType("only_there")
        module.Thing = type("Thing", (), {"__module__": "only_there"})
        return module.Thing()

    first, second = shared_pool.run(cloudpickle.dumps(stranger), calls(True, False))
    assert first.reason.startswith("a result that does not unpickle (ModuleNotFoundError")
    assert second == 1


@pytest.mark.slow
def test_a_pool_that_is_there_costs_no_descriptor():
    pool_for(Limits(workers=1))
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        assert len({id(pool_for(Limits(workers=1))) for _ in range(5)}) == 1
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_hundred_hangs_in_a_row_leave_a_working_pool_and_no_process(new_pool):
    before = running()
    pool = new_pool(timeout=0.2)
    outcomes = pool.run(MISBEHAVE, calls(*["hang", "hang holding the interpreter"] * 50))
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    during = running() - before
    assert len(during) <= 2 + 1 + 1 + 1  # the pool, its spare, the nursery, and perhaps one that is being killed
    assert pool.run(MISBEHAVE, calls(*range(50))) == [*range(50)]
    pool.close()
    assert gone(running() - before)


@pytest.mark.slow
def test_hangs_take_their_limit_and_little_more(new_pool):
    limit, workers = 1.0, 2
    pool = new_pool(timeout=limit, workers=workers)
    right = [index for index in range(1000) if index % 100]
    pool.run(MISBEHAVE, calls(1, 2))
    started = time.monotonic()
    pool.run(MISBEHAVE, calls(*right))
    normal = time.monotonic() - started
    started = time.monotonic()
    outcomes = pool.run(MISBEHAVE, calls(*["hang" if index % 100 == 0 else index for index in range(1000)]))
    assert [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Failure)] == [*range(0, 1000, 100)]
    assert [outcome for outcome in outcomes if not isinstance(outcome, Failure)] == right
    assert time.monotonic() - started < 1.2 * 10 * limit / workers + normal


def test_thousands_of_calls_share_a_few_processes(new_pool):
    def process_of(number):
        return os.getpid()

    pool = new_pool(workers=2)
    processes = pool.run(cloudpickle.dumps(process_of), calls(*range(4000)))
    assert len(processes) == 4000
    assert len(set(processes)) < 20  # five, of which two at a time


def test_as_many_calls_run_at_once_as_there_are_workers(new_pool, tmp_path):
    def crowd(mine):
        for mark in ("came", "here"):
            (tmp_path / f"{mark} {mine}").touch()
        while mine < 2 and len(list(tmp_path.glob("came [01]"))) < 2:
            time.sleep(0.005)  # the first two wait for each other
        time.sleep(0.05)
        size = len(list(tmp_path.glob("here *")))
        (tmp_path / f"here {mine}").unlink()
        return size

    assert 1 <= max(new_pool(timeout=30).run(cloudpickle.dumps(crowd), calls(*range(10)))) <= 2


def test_workers_are_replaced_after_their_share_of_calls(new_pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_CALLS_PER_WORKER", 3)
    pids = new_pool().run(cloudpickle.dumps(lambda _: os.getpid()), calls(*range(20)))
    assert max(pids.count(pid) for pid in pids) <= 3


def test_loading_and_warming_up_do_not_count_against_the_limit(new_pool):
    class Slow:
        is_warm = False

        def __setstate__(self, state):
            time.sleep(1.0)

        def warm_up(self):
            time.sleep(1.0)
            self.is_warm = True

        def __call__(self, value):
            return value if self.is_warm else None

    slow = Slow()
    slow.has_state = True
    assert new_pool(timeout=0.5).run(cloudpickle.dumps(slow), calls(1, 2, 3)) == [1, 2, 3]


class Unloadable:
    def __init__(self, load, *args):
        self.load = load, args

    def __reduce__(self):
        return self.load


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("exception", "not loaded in a worker: ZeroDivisionError"),
        ("sys.exit", "not loaded in a worker: SystemExit"),
        ("segmentation fault", "the worker died while it loaded the function (signal 11)"),
    ],
)
def test_a_function_that_does_not_load_fails_all_its_calls_and_no_others(new_pool, how, reason):
    pool = new_pool()
    outcomes = pool.run(pickle.dumps(Unloadable(misbehaving.misbehave, how)), calls(*range(5)))
    assert [outcome.reason.startswith(reason) for outcome in outcomes] == [True] * 5
    assert pool.run(MISBEHAVE, calls(1, 2)) == [1, 2]


def test_a_function_that_did_not_load_is_tried_again(new_pool, tmp_path):
    def read(path):
        path.read_text()
        return lambda _: 1

    pool, function = new_pool(), cloudpickle.dumps(Unloadable(read, tmp_path / "there"))
    assert all("FileNotFoundError" in outcome.reason for outcome in pool.run(function, calls(*range(9))))
    (tmp_path / "there").touch()
    assert pool.run(function, calls(*range(9))) == [1] * 9


def test_functions_share_the_workers(new_pool):
    pool = new_pool()
    functions = [cloudpickle.dumps(functools.partial(max, number)) for number in range(40)]
    assert [pool.run(function, calls(7, 50)) for function in functions] == [[max(n, 7), 50] for n in range(40)]


def test_alarms_work_and_do_not_outlast_their_call(new_pool):
    pool = new_pool(workers=1, timeout=5)
    assert pool.run(cloudpickle.dumps(lambda _: misbehaving.interrupted_by_alarm()), calls(1, 2)) == [1.0, 1.0]
    pool.run(cloudpickle.dumps(lambda _: misbehaving.leave_alarm()), calls(1))
    assert pool.run(cloudpickle.dumps(lambda _: time.sleep(0.2) or 2), calls(1, 2)) == [2, 2]


def test_a_function_that_returns_twice_answers_once(new_pool):
    pool = new_pool()
    assert pool.run(cloudpickle.dumps(lambda _: misbehaving.fork_and_return()), calls(*range(10))) == [1.0] * 10
    assert pool.run(MISBEHAVE, calls(*range(10))) == [*range(10)]


def test_prints_go_to_stderr_and_disturb_nothing(new_pool, capfd):
    pool = new_pool()
    assert pool.run(cloudpickle.dumps(lambda _: misbehaving.noise()), calls(*range(6))) == [1.0] * 6
    pool.close()
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("noise by descriptor"), printed.err.count("noise by print")) == ("", 6, 6)


def test_prints_beyond_a_limit_are_dropped(new_pool, capfd):
    pool = new_pool()
    assert pool.run(cloudpickle.dumps(lambda _: sys.stdout.write("x" * 30_000_000) / 3e7), calls(0)) == [1.0]
    pool.close()
    printed = capfd.readouterr().err
    assert 10_000_000 <= printed.count("x") < 10_100_000
    assert "10 MB shown, the rest is dropped" in printed


@pytest.mark.parametrize("end", ["hang", "segmentation fault", "close"])
def test_processes_that_a_call_started_end_with_its_worker(new_pool, tmp_path, end):
    def start(what):
        misbehaving.start_processes(tmp_path / "pids")
        return misbehaving.misbehave(what)

    pool = new_pool(timeout=3.0 if end == "hang" else 30.0)
    (outcome,) = pool.run(cloudpickle.dumps(start), calls(end))
    assert (outcome == "close") or isinstance(outcome, Failure)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    if end == "close":
        assert running(pids) == set(pids)  # the call is over, its worker is not
        pool.close()
    assert gone(pids)


@pytest.mark.slow
def test_a_family_of_processes_ends_with_its_worker(new_pool, tmp_path):
    pool = new_pool(timeout=3.0)
    (outcome,) = pool.run(pickle.dumps(functools.partial(misbehaving.multiply, str(tmp_path / "pids"))), calls(6))
    assert outcome.reason == "no result within 3 s"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2**6
    assert gone(pids)
    assert pool.run(MISBEHAVE, calls(1, 2)) == [1, 2]


def test_a_closed_pool_has_no_processes_and_starts_again(new_pool):
    before = running()
    pool = new_pool()
    assert running() == before  # none before the first call
    for _ in range(2):
        assert pool.run(MISBEHAVE, calls(1, 2)) == [1, 2]
        assert running() != before
        pool.close()
        assert gone(running() - before)


@pytest.mark.parametrize("killed", ["nursery", "idle workers"])
def test_killed_processes_are_replaced(new_pool, killed):
    before = running()
    pool = new_pool()
    pool.run(MISBEHAVE, calls(1, 2))
    own = running() - before
    nursery = {pid for pid in own if psutil.Process(pid).ppid() == os.getpid()}
    assert len(nursery) == 1
    for pid in nursery if killed == "nursery" else own - nursery:
        psutil.Process(pid).kill()
    assert gone(own - nursery)
    assert pool.run(MISBEHAVE, calls(*range(9))) == [*range(9)]


def test_two_threads_take_turns_and_outlive_each_other(new_pool):
    pool, results = new_pool(timeout=0.5), {}

    def use(number):
        results[number] = [pool.run(MISBEHAVE, calls(number, "hang", number)) for _ in range(2)]

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert [[first, third] for first, _, third in results[number]] == [[number, number]] * 2
    # The thread that started the workers is gone; they are not.
    assert pool.run(MISBEHAVE, calls(1, 2)) == [1, 2]


def test_large_messages_pass_both_ways(new_pool):
    data = [os.urandom(3_000_000) for _ in range(4)]
    digests = new_pool(timeout=30).run(cloudpickle.dumps(lambda b: (hashlib.sha256(b).digest(), b)), calls(*data))
    assert digests == [(hashlib.sha256(item).digest(), item) for item in data]


def test_equal_limits_share_a_pool():
    assert pool_for(Limits(timeout=3.5)) is pool_for(Limits(timeout=3.5))
    assert pool_for(Limits(timeout=3.5)) is not pool_for(Limits(timeout=4.5))
    close_pools()


def die_or_nap(what):
    if what == "die":
        os._exit(3)
    if what == "close":
        os.closerange(3, 256)
    time.sleep(60 if what == "close" else what)
    return what


def test_a_worker_that_closes_its_channel_is_not_waited_for(new_pool):
    pool = new_pool(timeout=30)
    function = pickle.dumps(die_or_nap)
    pool.run(function, calls(0, 0))
    began = time.monotonic()
    outcome, other = pool.run(function, calls("close", 0))
    assert (outcome.reason, other) == ("the worker died (signal 9)", 0)
    assert time.monotonic() - began < 5


def test_who_answered_while_another_was_dealt_with_is_not_late(new_pool, monkeypatch):
    pool = new_pool(timeout=0.5)
    function = pickle.dumps(die_or_nap)
    pool.run(function, calls(0, 0))  # loaded
    end = WorkerHandle.end

    def slowly(worker):
        time.sleep(1.0)
        return end(worker)

    monkeypatch.setattr(WorkerHandle, "end", slowly)
    died, slept = pool.run(function, calls("die", 0.2))
    assert (died.reason, slept) == ("the worker died (exit status 3)", 0.2)


def scribble(text):
    if isinstance(text, bytes):
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, text)
    return 1


@pytest.mark.parametrize(
    "text",
    [
        b"a line of text\n" * 9,
        *[pytest.param(text, marks=pytest.mark.slow) for text in ((8).to_bytes(8, "little") + b"8 bytes.", b"x")],
    ],
    ids=repr,
)
def test_writes_to_the_channel_of_a_worker_cost_one_row(new_pool, text):
    pool = new_pool(timeout=2.0, workers=1)
    function = pickle.dumps(scribble)
    pool.run(function, calls(*range(8)))  # quick calls travel in chunks from here on
    rows = [0] * 5 + [text] + [0] * 5 + [text] + [0] * 3
    outcomes = pool.run(function, calls(*rows))
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [row == text for row in rows]


def test_the_longest_limits_run(new_pool):
    assert new_pool(timeout=10**6, memory_mb=2**40).run(pickle.dumps(abs), calls(-1, -2)) == [1, 2]
