"""Two gloo processes give the weights of one, also when a group straddles the ranks."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import asked

SCRIPT = Path(__file__).parents[2] / "tests" / "support" / "distributed_run.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SECONDS = 240  # of a job at most


@pytest.fixture(scope="module")
def ask():
    """The script as a process that imports once for all tests."""
    with asked(SCRIPT, SECONDS, **ENVIRONMENT) as ask:
        yield ask


@pytest.fixture
def run(ask):
    """Runs jobs, whose weights must move, and gives the results of each: an output file, a number of processes, a
    mode of the script."""

    def results(*jobs):
        for output, processes, mode in jobs:
            # the script itself refuses another number of processes
            assert ask(f"{output}:{processes}:{mode}") == "0", Path(f"{output}.log").read_text()[-3000:]
        found = [torch.load(output, weights_only=False) for output, _, _ in jobs]
        assert min(difference(each["weights"], each["start"]) for each in found) > 1e-3
        return found

    return results


@pytest.fixture
def one_and_two(run, tmp_path):
    """Results of one process and of two, whose weights agree."""

    def results(mode, alone=None, within=1e-12):
        one, two = run((tmp_path / "one.pt", 1, alone or mode), (tmp_path / "two.pt", 2, mode))
        assert difference(two["weights"], one["weights"]) < within
        return one, two

    return results


def difference(first, second):
    return max(float((first[name] - second[name]).detach().abs().max()) for name in first)


@pytest.mark.parametrize(
    "mode",
    [
        "process",
        *[pytest.param(m, marks=pytest.mark.slow) for m in ("group_mean", "leave_one_out", "baseline", "turns")],
    ],
)
def test_two_processes_train_like_one(mode, one_and_two, tmp_path):
    one, two = one_and_two(mode)
    assert one["scale"] == pytest.approx(two["scale"])
    assert one["scale"]["count"] > 0
    assert_same_diagnostics(one, two, tmp_path)


@pytest.mark.slow
def test_two_processes_balance_experts_like_one(one_and_two):
    """Routers compute in float32; choices that each process counts by itself are 1e-3 off."""
    one, two = one_and_two("experts", within=1e-6)
    assert len(same_metrics(one, two, "aux_loss")) > 3


def same_metrics(one, two, prefixes):
    """Log by log those with such names, which are the same."""
    found = [{name: logs[name] for name in logs if name.startswith(prefixes)} for logs in one["log"]]
    for metrics, second in zip(found, two["log"], strict=True):
        assert metrics == pytest.approx({name: second[name] for name in metrics})
    return found


def assert_same_diagnostics(one, two, folder):
    """Statistics are over all ranks, and a group that straddles them is recorded whole."""
    groups = ("drgrpo/pass", "drgrpo/dead", "drgrpo/all", "drgrpo/effective", "difficulty/", "completions/length_")
    assert min(map(len, same_metrics(one, two, groups))) > 20
    recorded = [
        [json.loads(line) for line in (folder / f"{name}.pt.run/_drgrpo/completions.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert [group["group"] for group in recorded[1]] == [0, 1] * 4
    for first, second in zip(*recorded, strict=True):
        assert len(second["rows"]) == second["G"] == 6
        assert {**first, "time": 0} == {**second, "time": 0}
    starts = json.loads((folder / "two.pt.run/_drgrpo/run.json").read_text())["starts"]
    assert [start["processes"] for start in starts] == [2]


@pytest.mark.slow
def test_two_processes_draw_the_same_prompts_and_share_the_groups(one_and_two):
    one, two = one_and_two("sampling")
    for metrics in same_metrics(one, two, "sampling/"):
        assert metrics["sampling/groups_generated"] > metrics["sampling/groups_live"] > 0


@pytest.mark.slow
def test_two_processes_fork_like_one(one_and_two):
    one, two = one_and_two("forks")
    same = same_metrics(one, two, ("forks/cut_frac", "completions/unique_frac", "drgrpo/pass_rate"))
    assert [len(metrics) for metrics in same] == [3] * 4
    (alone,), (left, right) = one["asked"], two["asked"]
    assert left == right  # the one with fewer cuts asked for more than it took
    assert set(alone[::2]) == {6}
    cut = [(found, asked) for found, asked in zip(alone[1::2], left[1::2], strict=True)]
    assert any(found < 2 * asked for found, asked in cut)


@pytest.mark.slow
def test_only_the_first_of_two_processes_speaks_with_vllm(one_and_two):
    one, two = one_and_two("vllm")
    assert two["routes"] == one["routes"]
    assert two["prompts"] == one["prompts"]


def largest_gap(result):
    return max(entry["sampling/sampling_logp_difference/max"] for entry in result["log"])


@pytest.mark.slow
def test_two_processes_send_one_adapter_to_a_server(one_and_two):
    one, two = one_and_two("adapters")
    assert two["routes"] == one["routes"]
    assert two["routes"].count("/v1/load_lora_adapter") == 1 + 4
    assert max(map(largest_gap, (one, two))) < 1e-6


@pytest.mark.slow
def test_each_of_two_processes_loads_the_adapter_into_its_engine(run, tmp_path):
    (two,) = run((tmp_path / "two.pt", 2, "engines"))
    assert largest_gap(two) < 1e-6


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(tmp_path):
    output = tmp_path / "two.pt"
    command = [sys.executable, *TORCHRUN, str(SCRIPT), f"{output}:2:resume"]
    ended = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    done = torch.load(output, weights_only=False)
    assert difference(done["weights"], done["start"]) > 1e-3
    assert difference(done["resumed"], done["weights"]) == 0.0
    assert len(done["run_ids"]) == 4
    assert len(set(done["run_ids"])) == 1
    used, changed = done["refused"][:2]
    assert done["refused"] == [used, changed] * 2
    assert "which holds another run (checkpoint-4 and 3 more checkpoints)" in used
    assert "optimizer.pt was changed after it was written" in changed


@pytest.mark.slow
def test_two_processes_with_different_numbers_of_live_rows(one_and_two):
    # The first rank has six rows with a signal, the second none: both must run the same forwards, and the one that is
    # left carries the all-reduce.
    _, two = one_and_two("uneven", alone="uneven_upstream")
    assert min(entry["drgrpo/micro_batches"] for entry in two["log"]) < 3  # some slots ran nothing
    assert [entry["drgrpo/rows_skipped_frac"] >= 2 / 3 for entry in two["log"]] == [True] * 4


@pytest.mark.slow
def test_a_process_that_cannot_describe_its_rows_holds_up_nobody(one_and_two):
    _, two = one_and_two("blind", alone="group_mean")
    assert two["failures"] == {"The statistics of a batch": 4}
    assert not [name for entry in two["log"] for name in entry if name.startswith("difficulty/")]


@pytest.mark.slow
def test_a_sharded_model_trains_like_a_whole_one(run, tmp_path):
    # FSDP2; of three micro-batches per step ranks run as few as they need, packed behind one copy of each prompt.
    jobs = [("one", 1, "fsdp_uneven"), ("two", 2, "fsdp_uneven"), ("broken", 2, "fsdp_uneven_unweighted")]
    one, two, broken = run(*((tmp_path / f"{name}.pt", n, mode) for name, n, mode in jobs))
    assert two["kind"] == "DistributedType.FSDP"
    assert difference(two["weights"], one["weights"]) < 1e-12
    for first, second in zip(one["log"], two["log"], strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5, abs=1e-8)  # logged in float32
    assert max(entry["drgrpo/micro_batches"] for entry in two["log"]) < 3  # a slot that no rank needs is not run
    assert max(entry["drgrpo/upstream_token_frac"] for entry in two["log"]) < 0.25  # 0.27 without shared prompts
    assert difference(broken["weights"], one["weights"]) > 1e-6  # negative control


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["resume", "shards", "lora", "half"])
def test_a_sharded_run_resumes_bit_for_bit(mode, run, tmp_path):
    (done,) = run((tmp_path / "two.pt", 2, f"fsdp_{mode}"))
    assert done["kind"] == "DistributedType.FSDP"
    assert difference(done["resumed"], done["weights"]) == 0.0
    assert len(set(done["run_ids"])) == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_deepspeed_trains_like_one_process_and_resumes_bit_for_bit(stage, one_and_two, run, tmp_path):
    _, two = one_and_two(f"{stage}_uneven", within=1e-6)  # it computes in float32
    assert two["kind"] == "DistributedType.DEEPSPEED"
    assert [entry["drgrpo/micro_batches"] for entry in two["log"]] == [3] * 4
    (done,) = run((tmp_path / "three.pt", 2, f"{stage}_resume"))
    assert difference(done["resumed"], done["weights"]) == 0.0


@pytest.mark.slow
def test_sharded_adapters_train_like_whole_ones(one_and_two):
    one_and_two("fsdp_lora")


@pytest.mark.slow
def test_a_sharded_policy_generates_and_is_held_to_its_reference(one_and_two, run, tmp_path):
    one_and_two("fsdp_reference", within=1e-11)
    (done,) = run((tmp_path / "three.pt", 2, "fsdp_generate"))
    assert all(entry["completions/mean_length"] > 0 for entry in done["log"])
