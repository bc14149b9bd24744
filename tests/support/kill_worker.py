"""A process that imports once and forks a training run per request, so that runs can be killed for real. Not a test.

Reads one JSON object per line and answers with one. `point`: the run kills itself at that moment of writing or
deleting a checkpoint, counted from 0 (see `Moments`). Without it the run ends by itself.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import kept
import runs
import safetensors.torch
import torch
import transformers.modeling_utils
from datasets import Dataset
from runs import length_reward, short_run, step_reward
from tiny import tiny_tokenizer

from trl_drgrpo import DrGRPOTrainer

torch.set_num_threads(1)
TOKENIZER = tiny_tokenizer()
PROMPTS = Dataset.from_dict({"prompt": [f"{i}+{i * i}=" for i in range(8)]})
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def train(folder, resume):
    """A run with all of our state: two passes over each generation batch of two steps, a running scale, steps."""
    settings = {**short_run(folder), "max_steps": 8, "steps_per_generation": 4, "num_iterations": 2}
    settings |= {"scale_by_running_std": True, "step_separator": ["tokens:3"]}
    settings |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    arguments = {"step_reward_funcs": step_reward, "resume": resume or None}
    trainer = runs.train(DrGRPOTrainer, settings, PROMPTS, TOKENIZER, length_reward, **arguments)
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.save({"weights": weights, "scale": trainer.earlier.reward_scale.state_dict()}, folder / "end.part")
    (folder / "end.part").replace(folder / "end.pt")


class Moments:
    """Counts what a run does to its checkpoint folders from one step on, and kills it in the middle of one.

    A moment is a file that Python opens for writing, renames or deletes (audit events, the kill comes before it
    happens), or one that torch and safetensors write by themselves (the kill comes with half of it written).
    """

    def __init__(self, folder, first, point):
        self.marks = tuple(str(folder / f"checkpoint-{step}") for step in (first, first - 1))
        self.newest, self.next = folder / f"checkpoint-{first}", folder / f"checkpoint-{first + 1}"
        self.point, self.count = point, 0
        self.log = folder / "moments.txt"
        sys.addaudithook(self.audit)
        for owner, name in ((torch, "save"), (safetensors.torch, "save_file")):
            setattr(owner, name, self.half_way(getattr(owner, name)))
        transformers.modeling_utils.safe_save_file = safetensors.torch.save_file

    def happens(self, what, path):
        """Whether this is the moment."""
        if not str(path).startswith(self.marks) or not self.newest.exists() or self.next.exists():
            return False
        with self.log.open("a") as log:
            log.write(f"{self.count} {what} {path}\n")
        self.count += 1
        return self.count - 1 == self.point

    def audit(self, event, arguments):
        if event not in EVENTS or isinstance(arguments[0], int):
            return
        path = arguments[0]
        if event == "open" and not arguments[2] & WRITING:
            return
        dir_fd = [a for a in arguments[1:] if isinstance(a, int) and a >= 0] if event != "open" else []
        if dir_fd and not os.path.isabs(path):  # rmtree works relative to open folders
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd[0]}"), path)
        if self.happens(event, path):
            os.kill(os.getpid(), signal.SIGKILL)

    def half_way(self, save):
        def saves(content, target, *args, **kwargs):
            path = target.name if hasattr(target, "write") else target
            if not self.happens(save.__name__, path):
                return save(content, target, *args, **kwargs)
            save(content, target, *args, **kwargs)
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

        return saves


def run(line):
    """Fork a run, and say what is left."""
    request = json.loads(line)
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)

    def killed_or_whole():
        if request.get("point") is not None:
            Moments(folder, request["first"], request["point"])
        train(folder, request["resume"])

    child = kept.forked(folder / "log.txt", killed_or_whole)
    _, status = os.waitpid(child, 0)
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
    left = {
        "killed": os.WIFSIGNALED(status),
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "half_written": [name for name in checkpoints if (folder / name / "drgrpo_state.part").exists()],
        "threads_before_fork": threading.active_count(),
    }
    return json.dumps(left)


if __name__ == "__main__":
    kept.answer(run)
