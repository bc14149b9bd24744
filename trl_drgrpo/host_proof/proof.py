"""The proof that this package works on the installed libraries, on a tiny model, in seconds.

What is compared, each time with the library's own way:

- the gradient: the fast path with TRL's micro-batches and transformers' generation (`comparison.py`); then both with
  stock `trl.GRPOTrainer`, off-policy and with a KL term, under a divisor and a KL weight that TRL's loss has to read
  where this package puts them;
- the tokens: completions with those of transformers' own loop, from the same seed;
- the parts of the fast path: each must have saved work, as counters say;
- merged adapters: logits of the folder that `trl-drgrpo merge` writes, and of the weights that vLLM is sent.
"""

import copy
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from trl_drgrpo.features.fast_path.speed import GENERATION, SpeedPart
from trl_drgrpo.host_proof import proving
from trl_drgrpo.host_proof.comparison import (
    AS_TRL,
    PROMPTS_OF_A_RUN,
    SETTINGS,
    TOLERANCE,
    ModelResult,
    compare_with_trl,
    example_reward,
    train_briefly,
)
from trl_drgrpo.host_proof.recording import LORA, largest_difference, record
from trl_drgrpo.host_proof.tiny import tiny_model, tiny_tokenizer
from trl_drgrpo.single_gpu.merging import merge_adapter
from trl_drgrpo.upstream.weight_sync import merged_while_read

T = TypeVar("T")
MERGED = "merged adapters"
# What is compared -> how an error calls it, and what it is compared with. The first two are values of micro_batching.
COMPARED = {
    "exact": "a gradient of the fast path that is {} from TRL's",
    "upstream": "a gradient in TRL's micro-batches that is {} from stock TRL's",
    MERGED: "logits of merged adapters that are {} from those of base and adapter",
}


@dataclass(frozen=True)
class HostProof:
    """Result of a proof.

    Args:
        hosts (`dict[str, str]`): Versions that it holds for, see `keeping.hosts`.
        parts (`dict[str, str]`): `"yes"`, or why not, by the name of each part of the fast path.
        equal_tokens (`float`): Share of the completions that transformers' own loop samples from the same seed.
        differences (`dict[str, float]`): Relative difference of each of `COMPARED`; infinite after an error.
        errors (`dict[str, str]`): These errors, by the same names.
        seconds (`float`): Duration.
    """

    hosts: dict[str, str]
    parts: dict[str, str]
    equal_tokens: float
    differences: dict[str, float]
    errors: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def wrong(self) -> dict[str, str]:
        """Differences that are too large, in words, by their names in `COMPARED`."""
        wrong = {}
        for name, words in COMPARED.items():
            difference = self.differences[name]
            if not difference <= TOLERANCE:  # also where it is NaN
                wrong[name] = words.format(f"{difference:.1e}")
                if name in self.errors:
                    wrong[name] += f", which ends in {self.errors[name]}"
        return wrong

    @property
    def off(self) -> dict[SpeedPart, str]:
        """Parts of the fast path that do not work here, with the reason. Steps are recorded on a GPU alone, which the
        proof leaves alone."""
        reasons = {SpeedPart(name): reason for name, reason in self.parts.items() if reason != "yes"}
        reasons.pop(SpeedPart.RECORDED_STEPS, None)
        return reasons


def prove(trainer_class: Callable[..., Any], hosts: Mapping[str, str]) -> HostProof:
    """Run the proof in this process.

    Args:
        trainer_class (`type`): `DrGRPOTrainer`.
        hosts (`Mapping[str, str]`): Versions that it is made for.

    Raises:
        `OSError`: This machine, not its libraries, has ended the proof: a full disk, for one.
    """
    started = time.perf_counter()
    model = tiny_model(tiny_tokenizer())
    errors = {}

    def measured(name: str, measure: Callable[[], T], otherwise: T) -> T:
        try:
            return measure()
        except Exception as error:  # whatever other versions of the libraries raise
            cause = error.__cause__ or error
            # No result is kept of a full disk: it says nothing about the libraries.
            if isinstance(cause, (OSError, MemoryError)):
                raise cause from None
            message = " ".join(str(cause).split())[:300]
            errors[name] = f"{type(cause).__name__}: {message}"
            return otherwise

    nothing = ModelResult("", dict.fromkeys(SpeedPart, "its training ends in an error"), math.inf, 1.0)
    # The trainers that are built here would ask for a proof themselves.
    with proving():
        result = measured("exact", lambda: compare_with_trl(trainer_class, model), nothing)
        # Gradients can only be compared on the same completions, so transformers' loop samples them.
        planned = measured(
            "exact",
            lambda: _off_policy_difference(trainer_class, model, fast_generation=False),
            math.inf,
        )
        as_trl = measured(
            "upstream",
            lambda: _off_policy_difference(trainer_class, model, **AS_TRL),
            math.inf,
        )
        merged = measured(MERGED, _merged_difference, math.inf)
    differences = {
        "exact": max(planned, result.gradient_difference),
        "upstream": as_trl,
        MERGED: merged,
    }
    parts = {str(part): reason for part, reason in result.parts.items()}
    if result.equal_tokens < 1:
        wrong = f"{1 - result.equal_tokens:.0%} of the completions are not those of transformers' own loop"
        parts |= dict.fromkeys(map(str, GENERATION), wrong)
    return HostProof(
        dict(hosts),
        parts,
        result.equal_tokens,
        differences,
        errors,
        seconds=round(time.perf_counter() - started, 1),
    )


def _off_policy_difference(trainer_class: Callable[..., Any], model: PreTrainedModel, **settings: Any) -> float:
    """Compare with stock TRL in two optimizer steps of one generation, the second of them off-policy.

    Our trainer has twice the divisor at twice the learning rate, and twice the KL weight, halfway through its warm-up
    in the second step. Its steps equal TRL's only if TRL's loss reads divisor and KL weight where this package puts
    them. The KL term has no gradient in the first step, in which the policy is the reference.
    """
    learning_rate = 0.1
    beta = 4.0
    two_steps: dict[str, Any] = {"gradient_accumulation_steps": 1, "num_iterations": 2}
    stock_settings = SETTINGS | two_steps
    del stock_settings["run_log"]  # a field of this package
    stock_settings |= {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "use_bias_correction_kl": False,
        "beta": beta,
        "learning_rate": learning_rate,
    }
    stock = record(
        GRPOTrainer,
        GRPOConfig,
        model=copy.deepcopy(model),
        reward=example_reward,
        prompts=PROMPTS_OF_A_RUN,
        **stock_settings,
    )
    doubled = train_briefly(
        trainer_class,
        model,
        **two_steps,
        loss_normalizer=2 * SETTINGS["max_completion_length"],
        learning_rate=2 * learning_rate,
        beta=2 * beta,
        beta_warmup_steps=4,
        **settings,
    )
    if doubled.completions != stock.completions:
        raise ValueError("the completions are not those of stock TRL, though transformers' loop generates")
    # Twice the divisor halves our gradients.
    return largest_difference(doubled, stock, factor=2)


def _merged_difference() -> float:
    """Compare the logits of a model with an adapter and of what it is merged into, relative to the largest logit: the
    folder that `merge_adapter` writes, and the weights that vLLM is sent."""
    tokenizer = tiny_tokenizer()
    base = tiny_model(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted: Any = get_peft_model(copy.deepcopy(base), LoraConfig(**LORA))  # type: ignore[arg-type]
    adapted.eval()
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(f"{folder}/base")
        tokenizer.save_pretrained(f"{folder}/base")
        adapted.save_pretrained(f"{folder}/adapter")
        report = merge_adapter(f"{folder}/adapter", f"{folder}/merged", base=f"{folder}/base")
    with merged_while_read(adapted):
        adapted.merge_adapter()
        merged = {}
        for name, weight in adapted.named_parameters():
            # peft's names become the base's: `base_model.model.` goes, and `q_proj.base_layer.weight` is
            # `q_proj.weight` there.
            if ".lora_" not in name:
                base_name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                merged[base_name] = weight.detach().clone()
        adapted.unmerge_adapter()
    base.load_state_dict(merged)
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        merged_logits = base.eval()(input_ids=ids).logits
        adapted_logits = adapted(input_ids=ids).logits
    difference = (merged_logits - adapted_logits).abs().max().item()
    return max(difference, report.max_logit_difference) / report.max_logit
