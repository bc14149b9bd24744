"""Does an additional loss term stay exact under the fast path?

A tiny model is trained with the term, in float64, once in TRL's own micro-batches and once per other way to cut the
same rows: planned, smaller, off-policy, with adapters. A term that depends on single tokens or whole rows gives the
same gradient each time. Two kinds of terms do not: those that take a mean, a rank or a quantile over the micro-batch,
and those that have a loss where there is no advantage and do not say so.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from trl_drgrpo.check.parity import Case, CaseResult
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.host_proof.recording import Recording, largest_difference, record
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.hooks import LossTerm

TOLERANCE = 1e-10  # relative, float64
PLANNED = (("micro_batching", "exact"),)
AS_TRL = (("micro_batching", "upstream"),)


def loss_term_cases() -> list[tuple[Case, Case]]:
    """Pairs of settings whose gradients must agree: TRL's micro-batches, and another cut of the same rows."""
    return [
        (
            Case("TRL's micro-batches", 8, 1, settings=AS_TRL, steps_per_generation=1),
            Case("planned", 8, 1, settings=PLANNED, steps_per_generation=1),
        ),
        (
            Case("TRL's micro-batches", 8, 1, settings=AS_TRL, steps_per_generation=1),
            Case("a quarter of the rows at a time", 2, 4, 4, settings=AS_TRL),
        ),
        (
            Case("TRL's micro-batches, off-policy", 8, 1, settings=AS_TRL, steps_per_generation=2, num_iterations=2),
            Case("planned, off-policy", 8, 1, settings=PLANNED, steps_per_generation=2, num_iterations=2),
        ),
        (
            Case("TRL's micro-batches, LoRA, KL", 8, 1, beta=0.1, lora=True, settings=AS_TRL, steps_per_generation=1),
            Case("planned, LoRA, KL", 8, 1, beta=0.1, lora=True, settings=PLANNED, steps_per_generation=1),
        ),
    ]


def check_loss_terms(terms: Sequence[LossTerm | type[LossTerm]]) -> Iterator[CaseResult]:
    """
    Compare the gradients of each pair of [`loss_term_cases`], step by step, then whether the terms change anything.

    Args:
        terms (`Sequence`): As for `features=` of the trainer. Objects are used in every run, so give classes where
            a term has a state.

    Yields:
        [`CaseResult`]: Its `gradient_difference` is the largest over the optimizer steps. The last one is a control:
        the gradient without the terms, which must differ.
    """
    recordings: dict[Case, Recording] = {}

    def recorded(case: Case, features: Sequence[Any]) -> Recording:
        settings = case.training_settings(max_steps=4)
        arguments = {"features": features}
        return record(
            DrGRPOTrainer, DrGRPOConfig, lora=case.lora, plain_head=True, trainer_arguments=arguments, **settings
        )

    for expected, case in loss_term_cases():
        if expected not in recordings:
            recordings[expected] = recorded(expected, terms)
        difference = largest_difference(recorded(case, terms), recordings[expected])
        yield CaseResult(case, 4, 0.0, difference, difference <= TOLERANCE)
    # Off-policy: where the ratio is 1 a term with other weights for it has the gradient of the clipped loss.
    off_policy = loss_term_cases()[2][0]
    without = dataclasses.replace(off_policy, name="without the terms, off-policy", control=True)
    difference = largest_difference(recorded(without, ()), recordings[off_policy])
    yield CaseResult(without, 4, 0.0, difference, difference > TOLERANCE)
