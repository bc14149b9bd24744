"""A run that is killed (SIGKILL) at any moment of a checkpoint and resumed ends with the weights of a whole one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from processes import asked

from trl_drgrpo.features.resume.checkpoints import newest_complete_checkpoint

WORKER = Path(__file__).parents[2] / "tests" / "support" / "kill_worker.py"
FIRST = 5  # the step whose checkpoint is interrupted: two passes into the second generation batch


@pytest.fixture(scope="module")
def worker():
    """Sends a request to a process that forks a run per request."""
    with asked(WORKER, 240, PYTHONPATH=str(WORKER.parents[2])) as ask:
        yield lambda folder, resume=True, **request: json.loads(
            ask(json.dumps({"folder": str(folder), "resume": resume, **request}))
        )


@pytest.fixture(scope="module")
def whole(worker, tmp_path_factory):
    """The uninterrupted run, twice: it must not depend on anything but its seed."""
    runs = [tmp_path_factory.mktemp("whole") for _ in range(2)]
    answers = [worker(folder, resume=False) for folder in runs]
    assert [answer["code"] for answer in answers] == [0, 0], (runs[0] / "log.txt").read_text()[-2000:]
    assert answers[0]["threads_before_fork"] == 1
    first, second = (torch.load(folder / "end.pt") for folder in runs)
    assert difference(first, second) == []
    return first


def difference(first, second):
    assert first["scale"] == second["scale"]
    return [name for name in first["weights"] if not torch.equal(first["weights"][name], second["weights"][name])]


@pytest.mark.slow
def test_killed_at_every_moment_of_a_checkpoint(worker, whole, tmp_path):
    # save_total_limit=1: the checkpoint before is deleted in the same moments
    listing = tmp_path / "listing"
    assert worker(listing, point=-1, first=FIRST)["code"] == 0
    moments = (listing / "moments.txt").read_text().splitlines()
    names = {Path(line.split(" ", 2)[2]).name for line in moments}
    wanted = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "drgrpo_rollouts_0.pt"}
    assert wanted | {"trainer_state.json", "drgrpo_state.part", "model.safetensors", "checkpoint-4"} <= names
    sys.stdout.write("\n".join([*moments, ""]))
    for point in range(len(moments)):
        folder = tmp_path / str(point)
        answer = worker(folder, point=point, first=FIRST)
        assert answer["killed"], moments[point]
        newest = newest_complete_checkpoint(folder)
        assert newest is not None, moments[point]
        assert newest.name in (f"checkpoint-{FIRST}", f"checkpoint-{FIRST - 1}"), moments[point]
        assert worker(folder)["code"] == 0, (folder / "log.txt").read_text()[-2000:]
        assert difference(torch.load(folder / "end.pt"), whole) == [], moments[point]
        if answer["half_written"] == [f"checkpoint-{FIRST}"]:
            assert f"checkpoint-{FIRST} is skipped: it is incomplete" in (folder / "log.txt").read_text()
