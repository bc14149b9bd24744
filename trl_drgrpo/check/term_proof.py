"""Does an additional loss term stay exact under the fast path?

A tiny model is trained with the term, in float64, once in TRL's own micro-batches and once per other way to cut the
same rows: planned, smaller, off-policy, with adapters. A term that depends on single tokens or whole rows gives the
same gradient each time. Two kinds of terms do not: those that take a mean, a rank or a quantile over the micro-batch,
and those that have a loss where there is no advantage and do not say so.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from trl_drgrpo.check.parity import Case, CaseResult
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.host_proof.recording import Recording, largest_difference, record
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.hooks import LossTerm

TOLERANCE = 1e-10  # relative, float64, as for `parity.TOLERANCE`
PLANNED = (("micro_batching", "exact"),)
AS_TRL = (("micro_batching", "upstream"),)
ON_POLICY = Case("TRL's micro-batches", settings=AS_TRL)
OFF_POLICY = Case("TRL's micro-batches, off-policy", steps_per_generation=2, num_iterations=2, settings=AS_TRL)
ADAPTERS = Case("TRL's micro-batches, LoRA, KL", beta=0.1, lora=True, settings=AS_TRL)
# Pairs of settings whose gradients must agree: TRL's micro-batches, and another cut of the same rows.
LOSS_TERM_CASES = (
    (ON_POLICY, dataclasses.replace(ON_POLICY, name="planned", settings=PLANNED)),
    (ON_POLICY, Case("a quarter of the rows at a time", 2, 4, 4, settings=AS_TRL)),
    (OFF_POLICY, dataclasses.replace(OFF_POLICY, name="planned, off-policy", settings=PLANNED)),
    (ADAPTERS, dataclasses.replace(ADAPTERS, name="planned, LoRA, KL", settings=PLANNED)),
)


def check_loss_terms(terms: Sequence[LossTerm | type[LossTerm]]) -> Iterator[CaseResult]:
    """Compare the gradients of each pair of `LOSS_TERM_CASES`, step by step; then see that the terms change something.

    Args:
        terms (`Sequence`): As for `features=` of the trainer. Objects are used in every run, so give classes where
            a term has a state.

    Yields:
        [`CaseResult`]: Its `gradient_difference` is the largest over the optimizer steps. The last one is a control:
        the gradient without the terms, which must differ.
    """
    steps = 4
    # One run of TRL's micro-batches serves several pairs.
    recordings = {}

    def recorded(case: Case, features: Sequence[LossTerm | type[LossTerm]] = terms) -> Recording:
        return record(
            DrGRPOTrainer,
            DrGRPOConfig,
            lora=case.lora,
            plain_head=True,
            trainer_arguments={"features": features},
            **case.training_settings(max_steps=steps),
        )

    for reference, case in LOSS_TERM_CASES:
        if reference not in recordings:
            recordings[reference] = recorded(reference)
        difference = largest_difference(recorded(case), recordings[reference])
        is_equal = difference <= TOLERANCE
        yield CaseResult(case, steps, 0.0, difference, is_equal)
    # Off-policy: where the ratio is 1 a term with other weights for it has the gradient of the clipped loss.
    without = dataclasses.replace(OFF_POLICY, name="without the terms, off-policy", control=True)
    difference = largest_difference(recorded(without, ()), recordings[OFF_POLICY])
    is_different = difference > TOLERANCE
    yield CaseResult(without, steps, 0.0, difference, is_different)
