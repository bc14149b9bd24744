"""Statistics of one generation batch: pure functions over its rows, in plain Python floats.

The objective of Dr. GRPO is about two biases, so the batch is looked at from both sides: how long correct and
incorrect completions are (length bias), and which difficulties the gradient comes from (difficulty bias). A row's
*gradient weight* is `sum_t |A_it|`, its share of the gradient before the model has a say; GRPO's of the same row,
`|z_i|` with `z = (r - mean) / (std + 1e-4)` and the loss averaged over the row's own tokens, is the counterfactual
beside it.

Groups whose correct rows are known are sorted into six buckets of the pass rate: none, up to 25, 50, 75 percent,
less than all, all.

Behind these: what the correction for vLLM's probabilities makes of short and long rows, and step rewards.

Which completions are correct (`CorrectnessRule`) is a threshold on one named reward, never a guess about another one.
With `correct_threshold` a completion is correct when the reward reaches it. Without one, only a reward that has given
nothing but 0 and 1 so far is read as incorrect and correct; its first other value ends that, for good, and says what
to set. A completion without that reward is neither.
"""

import logging
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar

from trl_drgrpo.common.errors import InputError

logger = logging.getLogger(__name__)

T = TypeVar("T")
BUCKETS = ("0", "0-25", "25-50", "50-75", "75-100", "100")  # percent correct in the group, (a, b] but for the ends
STD_FLOOR = 1e-4  # what TRL adds to a group's std


@dataclass(frozen=True)
class BatchRows:
    """The rows of a generation batch, over all ranks; row `g * G + i` is completion i of group g.

    Args:
        num_generations (`int`): G; of groups of several sizes the largest.
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
        sizes (`P` ints, *optional*): Rows of each group where not all have G.
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
    sizes: Sequence[int] | None = None

    @property
    def groups(self) -> list[range]:
        """The rows of each group."""
        sizes = self.sizes
        if not sizes:
            sizes = [self.num_generations] * (len(self.rewards) // self.num_generations)
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _pick(values: Sequence[T], rows: Iterable[int]) -> list[T]:
    return [values[i] for i in rows]


def _rows_by_verdict(correct: Sequence[bool | None] | None) -> dict[str, list[int]]:
    """Return the correct and the incorrect rows; none where it is not known what is correct."""
    rows: dict[str, list[int]] = {"correct": [], "incorrect": []}
    for i, verdict in enumerate(correct or ()):
        if verdict is not None:
            rows["correct" if verdict else "incorrect"].append(i)
    return rows


def batch_statistics(rows: BatchRows, trains: bool = True) -> dict[str, float]:
    """Return all metrics of a generation batch.

    Args:
        rows ([`BatchRows`]): The batch.
        trains (`bool`, *optional*, defaults to `True`): Whether it is trained on; else nothing is said about the
            gradient.

    Returns:
        `dict[str, float]`: Metric to value; one that has nothing to be computed from is left out. Shares are between 0
        and 1, lengths in tokens. `drgrpo/reward_min`: the lowest outcome reward of a scorable row. See
        [`length_statistics`], [`group_statistics`], [`difficulty_statistics`], [`weight_statistics`].
    """
    result = {}
    # Some groups may be scorable in part: NaN is no reward.
    scored = [reward for reward in rows.rewards if not math.isnan(reward)]
    if scored:
        result["drgrpo/reward_min"] = min(scored)
    result |= length_statistics(rows) | group_statistics(rows, trains) | difficulty_statistics(rows, trains)
    if rows.weights is not None:
        result |= weight_statistics(rows.weights, rows.lengths, rows.correct)
    return result


def length_statistics(rows: BatchRows) -> dict[str, float]:
    """Return the lengths of correct and incorrect completions, and the shares of them that were cut off.

    Args:
        rows ([`BatchRows`]): The batch.

    Returns:
        `dict[str, float]`:

        - `completions/length_correct_mean`, `completions/length_incorrect_mean`: tokens;
        - `completions/length_gap_mean`: the incorrect ones' mean minus the correct ones';
        - `completions/truncated_correct_frac`, `completions/truncated_incorrect_frac`: share of the correct and of the
          incorrect completions that was cut off.

    Example: the shared example, rewards (1,0,0,1) and lengths (2,4,3,6).

    ```python
    >>> rows = BatchRows(4, [1, 0, 0, 1], [2, 4, 3, 6], [2, 4, 3, 6], [1, 2, 1.5, 3], [False] * 4, [1, 2, 3, 4],
    ...                  [True, False, False, True])
    >>> length_statistics(rows)["completions/length_gap_mean"]
    -0.5

    ```
    """
    result: dict[str, float] = {}
    for name, members in _rows_by_verdict(rows.correct).items():
        if members:
            lengths = _pick(rows.lengths, members)
            truncated = _pick(rows.truncated, members)
            result[f"completions/length_{name}_mean"] = statistics.fmean(lengths)
            result[f"completions/truncated_{name}_frac"] = statistics.fmean(truncated)
    correct = result.get("completions/length_correct_mean")
    incorrect = result.get("completions/length_incorrect_mean")
    if correct is not None and incorrect is not None:
        result["completions/length_gap_mean"] = incorrect - correct
    return result


def group_statistics(rows: BatchRows, trains: bool = True) -> dict[str, float]:
    """Return the shares of live and dead groups, and of their rows.

    Args:
        rows ([`BatchRows`]): The batch. Groups of one say nothing here.
        trains (`bool`, *optional*, defaults to `True`): Whether the batch is trained on.

    Returns:
        `dict[str, float]`:

        - `completions/unique_frac`: distinct completions of a group / G, mean over groups; where rows repeat others
          that could not be forked, what those that were sampled would come to as G;
        - `drgrpo/dead_groups_frac`: share of groups in which no token has an advantage; of these, and as shares of all
          groups, `drgrpo/all_correct_frac` and `drgrpo/all_incorrect_frac`: those whose scorable rows are all
          correct, all incorrect;
        - `drgrpo/effective_group_size`: `(sum_i a_i)^2 / sum_i a_i^2` with `a_i` the mean `|A_it|` of row i, mean over
          live groups: G when all rows weigh alike; `4 p (1 - p) G` at pass rate p.
    """
    if rows.num_generations < 2:
        return {}
    groups = rows.groups
    unique_fracs = [_unique_frac(rows, group) for group in groups]
    result = {"completions/unique_frac": statistics.fmean(unique_fracs)}
    if not trains:
        return result
    effective_sizes = []  # of live groups
    dead_rates = []  # pass rates of dead groups
    for group in groups:
        # Judged by advantages and not by rewards: with step rewards, rows of equal rewards may have advantages.
        if any(weight > 0 for weight in _pick(rows.gradient_weights, group)):
            effective_sizes.append(_participation(rows, group))
        else:
            dead_rates.append(_pass_rate(rows, group))
    result["drgrpo/dead_groups_frac"] = 1 - len(effective_sizes) / len(groups)
    if rows.correct is not None:
        result["drgrpo/all_correct_frac"] = dead_rates.count(1) / len(groups)
        result["drgrpo/all_incorrect_frac"] = dead_rates.count(0) / len(groups)
    if effective_sizes:
        result["drgrpo/effective_group_size"] = statistics.fmean(effective_sizes)
    return result


def difficulty_statistics(rows: BatchRows, trains: bool = True) -> dict[str, float]:
    """Return the difficulty of the prompts, and the share of the gradient from each difficulty, also under GRPO.

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
    # Rows that are neither correct nor incorrect are in no pass rate.
    judged = [correct for correct in rows.correct or () if correct is not None]
    if not judged:
        return {}
    result = {"drgrpo/pass_rate": statistics.fmean(judged)}
    if rows.num_generations < 2:
        return result
    # A group without any verdict is in no bucket.
    groups_by_bucket: list[list[range]] = [[] for _ in BUCKETS]
    for group in rows.groups:
        rate = _pass_rate(rows, group)
        if rate is not None:
            groups_by_bucket[bucket_index(rate)].append(group)
    measures: dict[str, Callable[[range], float]] = {"groups_frac": lambda group: 1.0}
    if trains:
        measures["gradient_weight_frac"] = lambda group: math.fsum(_pick(rows.gradient_weights, group))
        measures["gradient_weight_frac_grpo"] = lambda group: math.fsum(_grpo_gradient_weights(rows, group))
    for name, measure in measures.items():
        amounts = [list(map(measure, groups)) for groups in groups_by_bucket]
        # `fsum` rounds once, so that the shares do not depend on the order of the rows.
        total = math.fsum(chain.from_iterable(amounts))
        if total > 0:
            for bucket, amounts_of_bucket in zip(BUCKETS, amounts, strict=True):
                result[f"difficulty/{name}/{bucket}"] = math.fsum(amounts_of_bucket) / total
    return result


def grpo_zscores(rewards: Sequence[float]) -> list[float]:
    """Return GRPO's advantages of a group, `(r - mean) / (std + 1e-4)` with the sample std.

    0 where all rewards are equal: rounding would give the mean of equal numbers a tiny std of its own.

    Example:

    ```python
    >>> [round(z, 4) for z in grpo_zscores([1.0, 0.0, 0.0, 1.0])]
    [0.8659, -0.8659, -0.8659, 0.8659]

    ```
    """
    # Asked of the rewards themselves, not of their rounded deviations.
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    deviations = [reward - mean for reward in rewards]
    variance = math.fsum(deviation**2 for deviation in deviations) / (len(rewards) - 1)
    std = math.sqrt(variance)
    return [deviation / (std + STD_FLOOR) for deviation in deviations]


def _unique_frac(rows: BatchRows, group: range) -> float:
    """Return the share of distinct completions, from 1 / G, where all are alike, to 1."""
    sampled = [i for i in group if rows.copies is None or not rows.copies[i]]
    distinct = set(_pick(rows.texts, sampled))
    # One completion is distinct anyway; the others count by their share among those that were sampled. Two distinct
    # ones of three that were sampled, in a group of four: 1 + 1 * 3 / 2 = 2.5 of 4.
    distinct_beside_one = (len(distinct) - 1) * (len(group) - 1) / max(len(sampled) - 1, 1)
    return (1 + distinct_beside_one) / len(group)


def _pass_rate(rows: BatchRows, group: range) -> float | None:
    """Return the share of correct completions among those that are correct or incorrect; `None` without any."""
    if rows.correct is None:
        return None
    verdicts = _pick(rows.correct, group)
    judged = len(verdicts) - verdicts.count(None)
    if not judged:
        return None
    return verdicts.count(True) / judged


def bucket_index(rate: float) -> int:
    """Return the index into `BUCKETS` of a group's pass rate, 0 to 1."""
    if rate >= 1:  # apart from 75-100, to which the next line rounds up
        return len(BUCKETS) - 1
    return max(math.ceil(4 * rate), 0)


def _participation(rows: BatchRows, group: range) -> float:
    """Return `(sum w)^2 / sum w^2` over the rows that are trained on, `w` the mean `|A_it|` of each."""
    weights = []
    for i in group:
        if rows.trained[i] > 0:
            weights.append(rows.gradient_weights[i] / rows.trained[i])
    largest = max(weights)
    scaled = [weight / largest for weight in weights]  # the squares of tiny weights would be 0
    return math.fsum(scaled) ** 2 / math.fsum(weight**2 for weight in scaled)


def _grpo_gradient_weights(rows: BatchRows, group: range) -> list[float]:
    """Return `|z_i|` of the rows that are trained on: the row's mean over its own tokens of a constant."""
    scored = [i for i in group if not math.isnan(rows.rewards[i])]
    zscores = grpo_zscores(_pick(rows.rewards, scored))
    weights = []
    for i, zscore in zip(scored, zscores, strict=True):
        if rows.trained[i] > 0:
            weights.append(abs(zscore))
    return weights


QUARTERS = tuple(f"sampling/weight_q{q}_mean" for q in (1, 2, 3, 4))  # from the shortest rows to the longest


def weight_statistics(
    weights: Sequence[float],
    lengths: Sequence[int],
    correct: Sequence[bool | None] | None = None,
) -> dict[str, float]:
    """Return mean weights of short, long, correct and incorrect rows in the correction for vLLM's probabilities.

    Each token's loss is multiplied by a ratio of the policy's probability to the engine's, bounded in one of four
    ways. A row's weight is the mean ratio over its trained tokens. Where the ratio is the product over a row, noise
    that is the same for every token masks or clips long rows more often: a length bias that no other metric shows.

    Args:
        weights (`B` floats): NaN for rows without trained tokens, which are left out.
        lengths (`B` ints): In tokens.
        correct (`B` bools or `None`, *optional*): As in [`BatchRows`].

    Returns:
        `dict[str, float]`: `sampling/weight_q1_mean` (the shortest quarter of the rows) to `sampling/weight_q4_mean`,
        `sampling/weight_correct_mean`, `sampling/weight_incorrect_mean`. Rows of one length are in one quarter, that
        of their mean rank, so a quarter may be empty; what is empty is left out.

    Example:

    ```python
    >>> weight_statistics([1.0, 0.9, 0.8, 0.0], [10, 20, 30, 40])["sampling/weight_q4_mean"]
    0.0
    >>> list(weight_statistics([1.0, 1.0], [7, 7]))
    ['sampling/weight_q3_mean']

    ```
    """
    weighted = [i for i, weight in enumerate(weights) if not math.isnan(weight)]
    ordered = sorted(_pick(lengths, weighted))
    rows_by_metric: dict[str, list[int]] = {}
    for i in weighted:
        # The mean rank: rows of one length go together, or the order of the batch would decide their quarter.
        rank = (bisect_left(ordered, lengths[i]) + bisect_right(ordered, lengths[i])) / 2
        quarter = QUARTERS[int(4 * rank / len(ordered))]
        rows_by_metric.setdefault(quarter, []).append(i)
    for name, members in _rows_by_verdict(correct).items():
        rows_by_metric[f"sampling/weight_{name}_mean"] = sorted({*members} & {*weighted})
    result = {}
    for name, rows in sorted(rows_by_metric.items()):
        if rows:
            result[name] = statistics.fmean(_pick(weights, rows))
    return result


_POSITIONS = 4  # quarters of a completion


def step_statistics(
    step_rewards: Sequence[Sequence[float | None]], outcome_rewards: Sequence[float | None]
) -> dict[str, float]:
    """Return statistics of a generation batch's steps.

    A learned process reward can be raised without solving anything: by more steps, or by mistakes it cannot see. Then
    it rises while the outcome reward falls: `process_hacked` in `warning_causes.py` warns of it from these numbers.

    Args:
        step_rewards (`B` lists of `K_i` floats): Reward of each step; `None` = unscorable.
        outcome_rewards (`B` floats): Outcome reward of each row; `None` or NaN = unscorable.

    Returns:
        `dict[str, float]`: Metrics under `process/`; one that has nothing to be computed from is left out.

        - `process/steps_mean`: steps per completion, over completions that have any;
        - `process/reward_mean`: mean over scorable steps, in the units of the reward;
        - `process/reward_quarter_1` to `_4`: the same for the steps in each quarter of a completion;
        - `process/unscorable_frac`: share of steps without a reward, 0 to 1;
        - `process/outcome_correlation`: Pearson's, of a row's mean step reward with its outcome reward, -1 to 1.

    Example:

    ```python
    >>> step_statistics([[1.0, 0.0], [1.0, None]], [0.0, 1.0])["process/reward_mean"]
    0.6666666666666666

    ```
    """
    lengths = [len(row) for row in step_rewards if len(row)]
    if not lengths:
        return {}
    by_quarter: list[list[float]] = [[] for _ in range(_POSITIONS)]
    step_means: list[float] = []
    outcomes: list[float] = []
    for row, outcome in zip(step_rewards, outcome_rewards, strict=True):
        scores = []
        for k, score in enumerate(row):
            if score is not None:
                scores.append(score)
                middle = (k + 0.5) / len(row)  # never 1, so the last step is in the last quarter
                by_quarter[int(_POSITIONS * middle)].append(score)
        if scores and outcome is not None and not math.isnan(outcome):
            step_means.append(statistics.fmean(scores))
            outcomes.append(outcome)
    scored = sum(map(len, by_quarter))
    result = {
        "process/steps_mean": sum(lengths) / len(lengths),
        "process/unscorable_frac": 1 - scored / sum(lengths),
    }
    if scored:
        result["process/reward_mean"] = statistics.fmean(chain.from_iterable(by_quarter))
    for quarter, rewards in enumerate(by_quarter, start=1):
        if rewards:
            result[f"process/reward_quarter_{quarter}"] = statistics.fmean(rewards)
    if len(set(step_means)) > 1 and len(set(outcomes)) > 1:  # of a constant, no correlation is defined
        result["process/outcome_correlation"] = statistics.correlation(step_means, outcomes)
    return result


class CorrectnessRule:
    """Judges completions by one reward.

    Args:
        names (`Sequence[str]`): The reward functions, in their order.
        reward (`str`, *optional*): The one that says what is correct; the first one by default.
        threshold (`float`, *optional*): Correct if the reward is at least this; `None`: see the module docstring.

    Attributes:
        name (`str`): The reward that decides.
        index (`int`): Its column in the rewards per function.

    Raises:
        `InputError`: There is no reward of that name.

    Example:

    ```python
    >>> rule = CorrectnessRule(["accuracy", "format"])
    >>> rule.judge([1.0, 0.0, float("nan")])
    [True, False, None]
    >>> CorrectnessRule(["accuracy"], threshold=0.5).judge([0.7, 0.2])
    [True, False]

    ```
    """

    def __init__(self, names: Sequence[str], reward: str | None = None, threshold: float | None = None):
        if reward is not None and reward not in names:
            expected = f"one of {', '.join(names)}" if names else "a reward function's name"
            raise InputError("correct_reward", repr(reward), expected, "Name a reward function of the run.")
        self.name = names[0] if reward is None else reward
        self.index = list(names).index(self.name)
        self.threshold = threshold
        self.is_binary = True  # whether all values so far were 0 or 1

    def judge(self, rewards: Sequence[float]) -> list[bool | None] | None:
        """Return correct, incorrect or neither (`None`: NaN, unscorable) for each reward; `None` as a whole where it
        cannot be told."""
        threshold = self.threshold
        if threshold is None:
            for reward in rewards:
                if self.is_binary and not math.isnan(reward) and reward not in (0.0, 1.0):
                    self.is_binary = False
                    logger.info(
                        "The reward %r gave %g, so the run cannot tell which completions are correct: it logs no pass "
                        "rate and no lengths of correct and incorrect completions. Set correct_threshold (and "
                        "correct_reward, for another reward).",
                        self.name,
                        reward,
                    )
            # For good: a pass rate that comes and goes with the batches would mean nothing.
            if not self.is_binary:
                return None
            threshold = 1.0
        return [None if math.isnan(reward) else reward >= threshold for reward in rewards]
