"""Gradients of every optimizer step of a short run, ours and stock TRL's, and how far they are apart."""

import math

from runs import STOCK
from trl import GRPOConfig

from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer
from trl_drgrpo.features.fast_path.window import PLAN
from trl_drgrpo.host_proof.recording import DEFAULTS, record

EXACT = 1e-12  # relative, float64
GEOMETRY = {
    **DEFAULTS,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "max_steps": 4,
}


def half_dead(completion_ids):
    """Halves, so that means are exact; every third group, by its first completion, is all equal."""
    rewards = []
    for start in range(0, len(completion_ids), 4):
        group = [(sum(ids) % 3) / 2 for ids in completion_ids[start : start + 4]]
        rewards += [0.5] * 4 if sum(completion_ids[start]) % 3 == 0 else group
    return rewards


def gradients(trainer_class, settings, *, lora=False, **options):
    config_class, extra = (DrGRPOConfig, {}) if issubclass(trainer_class, DrGRPOTrainer) else (GRPOConfig, STOCK)
    options = {"reward": half_dead, "plain_head": True, **options}
    recording = record(trainer_class, config_class, lora=lora, **options, **{**GEOMETRY, **settings, **extra})
    return [step.gradients for step in recording.steps]


def difference(ours, stock):
    """Largest `|g - g'| / |g'|` over the optimizer steps."""
    worst = 0.0
    assert len(ours) == len(stock) >= 2
    for a, b in zip(ours, stock, strict=True):
        assert a.keys() == b.keys()
        apart = math.sqrt(sum((a[name] - b[name]).square().sum().item() for name in b))
        norm = math.sqrt(sum(value.square().sum().item() for value in b.values()))
        worst = max(worst, apart / norm if norm else apart)
    return worst


class Watching(DrGRPOTrainer):
    """Notes what was planned."""

    plans_seen: list = []  # noqa: RUF012

    def on_micro_batch(self, inputs):
        inputs = super().on_micro_batch(inputs)
        self.plans_seen.append(inputs.get(PLAN))
        return inputs
