"""Statistics of one generation batch: pure functions over its rows, in plain Python floats.

The objective of Dr. GRPO is about two biases, so the batch is looked at from both sides: how long correct and
incorrect completions are (length bias), and which difficulties the gradient comes from (difficulty bias). A row's
*gradient weight* is `sum_t |A_it|`, its share of the gradient before the model has a say; GRPO's of the same row,
`|z_i|` with `z = (r - mean) / (std + 1e-4)` and the loss averaged over the row's own tokens, is the counterfactual
beside it.

Groups whose correct rows are known are sorted into six buckets of the pass rate: none, up to 25, 50, 75 percent,
less than all, all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trl_drgrpo.features.diagnostics.correction import weight_statistics

BUCKETS = ("0", "0-25", "25-50", "50-75", "75-100", "100")  # percent correct in the group, (a, b] but for the ends
STD_FLOOR = 1e-4  # what TRL adds to a group's std


@dataclass(frozen=True)
class BatchRows:
    """The rows of a generation batch, over all ranks; row `g * G + i` is completion i of group g.

    Args:
        num_generations (`int`): G.
        rewards (`B` floats): Weighted outcome reward; NaN = unscorable.
        lengths (`B` ints): Completion tokens that the model wrote.
        trained (`B` ints): Those that are trained on (0 for a truncated row that is masked).
        gradient_weights (`B` floats): `sum_t |A_it|` over the tokens that are trained on.
        truncated (`B` bools): Whether the completion was cut off.
        texts (`B` hashable): Equal for equal completions, a hash of the tokens for example.
        correct (`B` bools or `None`, *optional*): Whether the row is correct, `None` for neither; `None` as a whole
            when it is not known what is correct.
        weights (`B` floats, *optional*): Mean of the ratios that correct for the probabilities of the engine that
            sampled, over the tokens that are trained on, NaN without any; `None` where nothing is corrected.
        copies (`B` bools, *optional*): Rows that were not sampled: they repeat one that could not be forked.
    """

    num_generations: int
    rewards: Sequence[float]
    lengths: Sequence[int]
    trained: Sequence[int]
    gradient_weights: Sequence[float]
    truncated: Sequence[bool]
    texts: Sequence[int]
    correct: Sequence[bool | None] | None = None
    weights: Sequence[float] | None = None
    copies: Sequence[bool] | None = None

    @property
    def groups(self) -> list[range]:
        """The rows of each group."""
        size = self.num_generations
        return [range(start, start + size) for start in range(0, len(self.rewards), size)]


def batch_statistics(rows: BatchRows, trains: bool = True) -> dict[str, float]:
    """All metrics of a generation batch.

    Args:
        rows ([`BatchRows`]): The batch.
        trains (`bool`, *optional*, defaults to `True`): Whether it is trained on; else nothing is said about the
            gradient.

    Returns:
        `dict[str, float]`: Metric to value; one that has nothing to be computed from is left out. Shares are between 0
        and 1, lengths in tokens. `drgrpo/reward_min`: the lowest outcome reward of a scorable row. See
        [`length_statistics`], [`group_statistics`], [`difficulty_statistics`], [`weight_statistics`].
    """
    scored = [reward for reward in rows.rewards if not math.isnan(reward)]
    lowest = {"drgrpo/reward_min": min(scored)} if scored else {}
    of_weights = {} if rows.weights is None else weight_statistics(rows.weights, rows.lengths, rows.correct)
    return (
        lowest
        | length_statistics(rows)
        | group_statistics(rows, trains)
        | difficulty_statistics(rows, trains)
        | of_weights
    )


def length_statistics(rows: BatchRows) -> dict[str, float]:
    """Lengths of correct and incorrect completions, and who was cut off.

    Args:
        rows ([`BatchRows`]): The batch.

    Returns:
        `dict[str, float]`:

        - `completions/length_correct_mean`, `completions/length_incorrect_mean`: tokens;
        - `completions/length_gap_mean`: the incorrect ones' mean minus the correct ones';
        - `completions/truncated_frac`: share of completions that were cut off; `completions/truncated_correct_frac`
          and `completions/truncated_incorrect_frac`: among the correct and among the incorrect ones.

    Example: the shared example, rewards (1,0,0,1) and lengths (2,4,3,6).

    ```python
    >>> rows = BatchRows(4, [1, 0, 0, 1], [2, 4, 3, 6], [2, 4, 3, 6], [1, 2, 1.5, 3], [False] * 4, [1, 2, 3, 4],
    ...                  [True, False, False, True])
    >>> length_statistics(rows)["completions/length_gap_mean"]
    -0.5

    ```
    """
    result = {"completions/truncated_frac": _mean(rows.truncated)}
    if rows.correct is None:
        return result
    for name, wanted in (("correct", True), ("incorrect", False)):
        chosen = [i for i, correct in enumerate(rows.correct) if correct is wanted]
        if chosen:
            result[f"completions/length_{name}_mean"] = _mean([rows.lengths[i] for i in chosen])
            result[f"completions/truncated_{name}_frac"] = _mean([rows.truncated[i] for i in chosen])
    means = [result.get(f"completions/length_{name}_mean") for name in ("incorrect", "correct")]
    if means[0] is not None and means[1] is not None:
        result["completions/length_gap_mean"] = means[0] - means[1]
    return result


def group_statistics(rows: BatchRows, trains: bool = True) -> dict[str, float]:
    """Shares of groups, and of their rows, with a signal.

    Args:
        rows ([`BatchRows`]): The batch. Groups of one say nothing here.
        trains (`bool`, *optional*, defaults to `True`): Whether the batch is trained on.

    Returns:
        `dict[str, float]`:

        - `completions/unique_frac`: distinct completions of a group / G, mean over groups; where rows repeat others
          that could not be forked, what those that were sampled would come to as G;
        - `drgrpo/zero_signal_frac`: share of groups in which no token has an advantage; of these, and as shares of all
          groups, `drgrpo/all_correct_frac` and `drgrpo/all_incorrect_frac`: those whose scorable rows are all
          correct, all incorrect;
        - `drgrpo/effective_group_size`: `(sum_i a_i)^2 / sum_i a_i^2` with `a_i` the mean `|A_it|` of row i, mean over
          groups with a signal: G when all rows weigh alike; `4 p (1 - p) G` at pass rate p.
    """
    if rows.num_generations < 2:
        return {}
    groups = rows.groups
    result = {"completions/unique_frac": _mean([_unique_frac(rows, group) for group in groups])}
    if not trains:
        return result
    live = [any(rows.gradient_weights[i] > 0 for i in group) for group in groups]
    result["drgrpo/zero_signal_frac"] = 1 - _mean(live)
    if rows.correct is not None:
        dead_rates = [None if alive else _pass_rate(rows, g) for g, alive in zip(groups, live, strict=True)]
        result["drgrpo/all_correct_frac"] = _mean([rate == 1 for rate in dead_rates])
        result["drgrpo/all_incorrect_frac"] = _mean([rate == 0 for rate in dead_rates])
    if any(live):
        sizes = [_participation(_row_advantages(rows, g)) for g, alive in zip(groups, live, strict=True) if alive]
        result["drgrpo/effective_group_size"] = _mean(sizes)
    return result


def difficulty_statistics(rows: BatchRows, trains: bool = True) -> dict[str, float]:
    """Difficulty of the prompts, and the share of the gradient from each difficulty, ours and GRPO's.

    Args:
        rows ([`BatchRows`]): The batch.
        trains (`bool`, *optional*, defaults to `True`): Whether it is trained on.

    Returns:
        `dict[str, float]`: Nothing when it is not known what is correct.

        - `drgrpo/pass_rate`: share of correct rows among those that are correct or incorrect;
        - `difficulty/groups_frac/<bucket>`: share of the groups, sums to 1;
        - `difficulty/gradient_weight_frac/<bucket>`: share of `sum |A_it|` over all rows and tokens, sums to 1;
        - `difficulty/gradient_weight_frac_grpo/<bucket>`: share of `sum_i |z_i|`, sums to 1.
    """
    known = [] if rows.correct is None else [correct for correct in rows.correct if correct is not None]
    if not known:
        return {}
    result = {"drgrpo/pass_rate": _mean(known)}
    if rows.num_generations < 2:
        return result
    rates = [(group, _pass_rate(rows, group)) for group in rows.groups]
    buckets = [(group, bucket_index(rate)) for group, rate in rates if rate is not None]
    shares = {"groups_frac": [1.0] * len(buckets)}
    if trains:
        shares["gradient_weight_frac"] = [math.fsum(rows.gradient_weights[i] for i in group) for group, _ in buckets]
        shares["gradient_weight_frac_grpo"] = [math.fsum(_grpo_gradient_weights(rows, group)) for group, _ in buckets]
    for name, amounts in shares.items():
        total = math.fsum(amounts)
        for b, bucket in enumerate(BUCKETS):
            if total > 0:
                part = math.fsum(a for a, (_, of) in zip(amounts, buckets, strict=True) if of == b)
                result[f"difficulty/{name}/{bucket}"] = part / total
    return result


def grpo_zscores(rewards: Sequence[float]) -> list[float]:
    """GRPO's advantages of a group, `(r - mean) / (std + 1e-4)` with the sample std; 0 where all rewards are equal.

    Example:

    ```python
    >>> [round(z, 4) for z in grpo_zscores([1.0, 0.0, 0.0, 1.0])]
    [0.8659, -0.8659, -0.8659, 0.8659]

    ```
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = _mean(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + STD_FLOOR) for reward in rewards]


def _unique_frac(rows: BatchRows, group: range) -> float:
    """One completion is distinct anyway: from 1 / G, all alike, to 1."""
    texts = [rows.texts[i] for i in group if rows.copies is None or not rows.copies[i]]
    further = (len(set(texts)) - 1) * (len(group) - 1) / (len(texts) - 1)
    return (1 + further) / len(group)


def _pass_rate(rows: BatchRows, group: range) -> float | None:
    correct = [] if rows.correct is None else [rows.correct[i] for i in group if rows.correct[i] is not None]
    return _mean([r is True for r in correct]) if correct else None


def bucket_index(rate: float) -> int:
    """Index into `BUCKETS` of a group's pass rate, 0 to 1."""
    if rate <= 0 or rate >= 1:
        return 0 if rate <= 0 else len(BUCKETS) - 1
    return math.ceil(4 * rate)


def _row_advantages(rows: BatchRows, group: range) -> list[float]:
    """Mean `|A_it|` of each row that is trained on."""
    return [rows.gradient_weights[i] / rows.trained[i] for i in group if rows.trained[i] > 0]


def _participation(weights: Sequence[float]) -> float:
    """`(sum w)^2 / sum w^2`, of weights scaled by the largest (squares of tiny ones would vanish)."""
    largest = max(weights)
    scaled = [weight / largest for weight in weights]
    return math.fsum(scaled) ** 2 / math.fsum(weight**2 for weight in scaled)


def _grpo_gradient_weights(rows: BatchRows, group: range) -> list[float]:
    """`|z_i|` of the rows that are trained on: the row's mean over its own tokens of a constant."""
    scored = [i for i in group if not math.isnan(rows.rewards[i])]
    zscores = grpo_zscores([rows.rewards[i] for i in scored])
    return [abs(z) for i, z in zip(scored, zscores, strict=True) if rows.trained[i] > 0]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
