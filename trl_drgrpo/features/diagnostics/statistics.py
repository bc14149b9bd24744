"""Statistics of one generation batch: pure functions over its rows, in plain Python floats.

The objective of Dr. GRPO is about two biases, so the batch is looked at from both sides: how long correct and
incorrect completions are (length bias), and which difficulties the gradient comes from (difficulty bias). A row's
*gradient weight* is `sum_t |A_it|`, its share of the gradient before the model has a say; GRPO's of the same row,
`|z_i|` with `z = (r - mean) / (std + 1e-4)` and the loss averaged over the row's own tokens, is the counterfactual
beside it.

Groups whose correct rows are known are sorted into six buckets of the pass rate: none, up to 25, 50, 75 percent,
less than all, all.

Behind these: what the correction for vLLM's probabilities makes of short and long rows, step rewards, and the push of
an update on the decision to stop.

Which completions are correct (`CorrectnessRule`) is a threshold on one named reward, never a guess about another one.
With `correct_threshold` a completion is correct when the reward reaches it. Without one, only a reward that has given
nothing but 0 and 1 so far is read as incorrect and correct; its first other value ends that, for good, and says what
to set. A completion without that reward is neither.
"""

import logging
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from trl_drgrpo.common.errors import InputError

logger = logging.getLogger(__name__)

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
        sizes = self.sizes or [self.num_generations] * (len(self.rewards) // self.num_generations)
        return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


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
    for name, verdict in (("correct", True), ("incorrect", False)):
        chosen = [i for i, correct in enumerate(rows.correct or ()) if correct is verdict]
        if chosen:
            result[f"completions/length_{name}_mean"] = statistics.fmean([rows.lengths[i] for i in chosen])
            result[f"completions/truncated_{name}_frac"] = statistics.fmean([rows.truncated[i] for i in chosen])
    means = [result.get(f"completions/length_{name}_mean") for name in ("incorrect", "correct")]
    if means[0] is not None and means[1] is not None:
        result["completions/length_gap_mean"] = means[0] - means[1]
    return result


def group_statistics(rows: BatchRows, trains: bool = True) -> dict[str, float]:
    """Shares of live and dead groups, and of their rows.

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
    result = {"completions/unique_frac": statistics.fmean([_unique_frac(rows, group) for group in groups])}
    if not trains:
        return result
    live = [any(rows.gradient_weights[i] > 0 for i in group) for group in groups]
    result["drgrpo/dead_groups_frac"] = 1 - statistics.fmean(live)
    if rows.correct is not None:
        dead_rates = [None if alive else _pass_rate(rows, g) for g, alive in zip(groups, live, strict=True)]
        result["drgrpo/all_correct_frac"] = statistics.fmean([rate == 1 for rate in dead_rates])
        result["drgrpo/all_incorrect_frac"] = statistics.fmean([rate == 0 for rate in dead_rates])
    if any(live):
        sizes = [_participation(rows, g) for g, alive in zip(groups, live, strict=True) if alive]
        result["drgrpo/effective_group_size"] = statistics.fmean(sizes)
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
    judged = [correct for correct in rows.correct or () if correct is not None]
    if not judged:
        return {}
    result = {"drgrpo/pass_rate": statistics.fmean(judged)}
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
    mean = statistics.fmean(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + STD_FLOOR) for reward in rewards]


def _unique_frac(rows: BatchRows, group: range) -> float:
    """Share of distinct completions, from 1 / G, where all are alike, to 1."""
    texts = [rows.texts[i] for i in group if rows.copies is None or not rows.copies[i]]
    # One completion is distinct anyway; the others count by their share among those that were sampled.
    distinct_beside_one = (len(set(texts)) - 1) * (len(group) - 1) / max(len(texts) - 1, 1)
    return (1 + distinct_beside_one) / len(group)


def _pass_rate(rows: BatchRows, group: range) -> float | None:
    correct = [] if rows.correct is None else [rows.correct[i] for i in group if rows.correct[i] is not None]
    return statistics.fmean([r is True for r in correct]) if correct else None


def bucket_index(rate: float) -> int:
    """Index into `BUCKETS` of a group's pass rate, 0 to 1."""
    if rate <= 0 or rate >= 1:
        return 0 if rate <= 0 else len(BUCKETS) - 1
    return math.ceil(4 * rate)


def _participation(rows: BatchRows, group: range) -> float:
    """`(sum w)^2 / sum w^2` over the rows that are trained on, `w` the mean `|A_it|` of each, scaled by the largest
    (squares of tiny ones would vanish)."""
    weights = [rows.gradient_weights[i] / rows.trained[i] for i in group if rows.trained[i] > 0]
    largest = max(weights)
    scaled = [weight / largest for weight in weights]
    return math.fsum(scaled) ** 2 / math.fsum(weight**2 for weight in scaled)


def _grpo_gradient_weights(rows: BatchRows, group: range) -> list[float]:
    """`|z_i|` of the rows that are trained on: the row's mean over its own tokens of a constant."""
    scored = [i for i in group if not math.isnan(rows.rewards[i])]
    zscores = grpo_zscores([rows.rewards[i] for i in scored])
    return [abs(z) for i, z in zip(scored, zscores, strict=True) if rows.trained[i] > 0]


QUARTERS = tuple(f"sampling/weight_q{q}_mean" for q in (1, 2, 3, 4))  # from the shortest rows to the longest


def weight_statistics(
    weights: Sequence[float], lengths: Sequence[int], correct: Sequence[bool | None] | None = None
) -> dict[str, float]:
    """Mean weights of short and long rows, and of correct and incorrect ones, in the correction for vLLM's
    probabilities.

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
    ordered = sorted(lengths[i] for i in weighted)
    chosen: dict[str, list[int]] = {}
    for i in weighted:
        rank = statistics.fmean((bisect_left(ordered, lengths[i]), bisect_right(ordered, lengths[i])))
        chosen.setdefault(QUARTERS[int(4 * rank / len(ordered))], []).append(i)
    for name, verdict in (("correct", True), ("incorrect", False)):
        rows_of_verdict = [i for i in weighted if correct is not None and correct[i] is verdict]
        chosen[f"sampling/weight_{name}_mean"] = rows_of_verdict
    return {name: statistics.fmean(weights[i] for i in rows) for name, rows in sorted(chosen.items()) if rows}


_POSITIONS = 4  # quarters of a completion


def step_statistics(
    step_rewards: Sequence[Sequence[float | None]], outcome_rewards: Sequence[float | None]
) -> dict[str, float]:
    """Statistics of a generation batch's steps.

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
    rows = [row for row in step_rewards if len(row)]
    if not rows:
        return {}
    scored = [s for row in rows for s in row if s is not None]
    total = sum(len(row) for row in rows)
    result = {"process/steps_mean": total / len(rows), "process/unscorable_frac": 1 - len(scored) / total}
    if scored:
        result["process/reward_mean"] = statistics.fmean(scored)
    for quarter in range(_POSITIONS):
        values = [s for row in rows for k, s in enumerate(row) if s is not None and _quarter(k, len(row)) == quarter]
        if values:
            result[f"process/reward_quarter_{quarter + 1}"] = statistics.fmean(values)
    correlation = _correlation(step_rewards, outcome_rewards)
    return result if correlation is None else {**result, "process/outcome_correlation": correlation}


def _quarter(step: int, steps: int) -> int:
    """Quarter of a completion that the middle of a step falls into."""
    return int(_POSITIONS * (step + 0.5) / steps)


def _correlation(
    step_rewards: Sequence[Sequence[float | None]], outcome_rewards: Sequence[float | None]
) -> float | None:
    step_means: list[float] = []
    outcomes: list[float] = []
    for row, outcome in zip(step_rewards, outcome_rewards, strict=True):
        scores = [score for score in row if score is not None]
        if scores and outcome is not None and not math.isnan(outcome):
            step_means.append(statistics.fmean(scores))
            outcomes.append(outcome)
    if len(set(step_means)) < 2 or len(set(outcomes)) < 2:
        return None
    return statistics.correlation(step_means, outcomes)


@dataclass(frozen=True)
class Push:
    """Mean over groups, its standard error, and their number. In decisions per unit of weight."""

    value: float
    standard_error: float
    groups: int


def decision_scores(lengths: np.ndarray, stopped: np.ndarray, groups: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """`k_i - c T_i` of each row `(B,)`; NaN in a batch of one group.

    Args:
        lengths (`np.ndarray` of shape `(B,)`): T, tokens of each row.
        stopped (`np.ndarray` of shape `(B,)`, bool): Rows that ended by themselves; the others were cut off.
        groups (`np.ndarray` of shape `(B,)`, int), batches (`np.ndarray` of shape `(B,)`, int):
            Group of each row, different between batches, and its batch.
    """
    went_on = lengths - stopped
    share_of_others = {}  # of decisions to go on, in the other groups of the batch
    for batch in np.unique(batches):
        inside = batches == batch
        for group in np.unique(groups[inside]):
            other_rows = inside & (groups != group)
            decisions = lengths[other_rows].sum()
            share_of_others[group] = went_on[other_rows].sum() / decisions if decisions else math.nan
    return went_on - np.array([share_of_others[group] for group in groups]) * lengths


def stop_push(weights: np.ndarray, scores: np.ndarray, chosen: np.ndarray, groups: np.ndarray) -> Push:
    """The push of an update on the decision to stop, of some rows of each group, over the weight of the whole group.

    At each token a policy goes on or stops. Were that one coin with probability c of going on, the gradient of its
    logit over a row of T decisions, k of them to go on, would be `k - c T`, and the push of an update

        sum_i w_i (k_i - c T_i),    w_i: weight of each token of row i, its advantage included.

    Above 0 it makes answers longer. Over correct and incorrect answers apart it is the length bias at its source:
    under a mean per row (`w_i = A_i / T_i`) incorrect answers are pushed to go on and correct ones to stop, about as
    hard, so that the two cancel in whatever a policy shares between them. How much is left depends on how well it
    tells them apart. c is that of the *other* groups of a batch: with the own group's, a row's length would be
    compared with itself.

    Args:
        weights (`np.ndarray` of shape `(B,)`): Of each token of a row, the advantage included.
        scores (`np.ndarray` of shape `(B,)`): From [`decision_scores`].
        chosen (`np.ndarray` of shape `(B,)`, bool): The rows whose push is asked for: the correct ones, say.
        groups (`np.ndarray` of shape `(B,)`, int): Group of each row.

    Returns:
        [`Push`]: Over the live groups; NaN where there is none.
    """
    pushes = []
    for group in np.unique(groups):
        rows = groups == group
        weight = np.abs(weights[rows]).sum()
        if weight > 0 and not np.isnan(scores[rows]).any():
            pushes.append((weights * scores)[rows & chosen].sum() / weight)
    return _mean_score(pushes)


def _mean_score(values: Sequence[float]) -> Push:
    if len(values) < 2:
        return Push(values[0] if values else math.nan, math.nan, len(values))
    return Push(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values)), len(values))


class CorrectnessRule:
    """Judges completions by one reward.

    Args:
        names (`Sequence[str]`): The reward functions, in their order.
        reward (`str`, *optional*): The one that says what is correct; the first one by default.
        threshold (`float`, *optional*): Correct if the reward is at least this; `None`: see the module docstring.

    Attributes:
        name (`str`): The reward that is asked.
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
        self.name = reward if reward is not None else names[0]
        self.index = list(names).index(self.name)
        self.threshold = threshold
        self.is_binary = True  # whether all values so far were 0 or 1

    def judge(self, rewards: Sequence[float]) -> list[bool | None] | None:
        """Per reward: correct, incorrect, or neither (`None`); NaN is unscorable. `None` as a whole: it cannot be
        told."""
        if self.threshold is not None:
            return [None if math.isnan(reward) else reward >= self.threshold for reward in rewards]
        if self.is_binary:
            graded = next((r for r in rewards if not math.isnan(r) and r not in (0.0, 1.0)), None)
            if graded is None:
                return [None if math.isnan(reward) else reward == 1.0 for reward in rewards]
            self.is_binary = False
            logger.info(
                "The reward %r gave %g, so the run cannot tell which completions are correct: it logs no pass rate "
                "and no lengths of correct and incorrect completions. Set correct_threshold (and correct_reward, for "
                "another reward).",
                self.name,
                graded,
            )
        return None
