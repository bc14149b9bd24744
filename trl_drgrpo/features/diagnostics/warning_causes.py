"""The causes that a run is warned of: for each its metrics, its condition, and the text with the advice.

A new cause is a function here, or in any package that a script imports: see `register_warning`. Its first sentence is
its help. Defaults of the thresholds are those of its keywords, and `steps`.
"""

import math
import operator
import statistics
from collections.abc import Sequence

from trl_drgrpo.features.diagnostics.run_warnings import Window, register_warning, span_of
from trl_drgrpo.features.diagnostics.statistics import QUARTERS
from trl_drgrpo.features.diagnostics.trends import change, distance_from_usual, mean_of, moved

Series = Sequence[float]
WithGaps = Sequence[float | None]  # a metric that may be missing


def _mostly(cut_off: WithGaps) -> float:
    """Return the share of completions that are cut off if that is most of them, else 0."""
    share = mean_of(cut_off)
    if share < 0.5:
        return 0.0
    return share


def only_value(rewards: WithGaps, lowest: WithGaps) -> float | None:
    """Return the reward of all completions of a window, if all have the same one; `None`: they differ."""
    # A mean that equals the lowest of its values is the mean of equal values.
    present = [value for value in (*rewards, *lowest) if value is not None]
    if len(present) < len(rewards) + len(lowest):
        return None
    spread = max(present) - min(present)
    if spread > 1e-6 * max(abs(min(present)), 1.0):  # float32, in which rewards are summed, has seven digits
        return None
    return present[-1]


def _about_one_value(only: float | None) -> str:
    """Return the remark on rewards that are all equal; empty if they are not."""
    if only is None:
        return ""
    return (
        f" Every completion got the same reward, {only:.3g}: the reward may not see their texts. With chat prompts a "
        "completion is a list of messages, so that `len(completion)` is 1 and no text is in it: read "
        "`completion_text(completion)`, and let `train --dry_run` try the reward (recipes/guides/rewards.md)."
    )


@register_warning(
    *("completions/clipped_ratio", "drgrpo/dead_groups_frac", "reward", "drgrpo/reward_min"),
    also=("drgrpo/pass_rate",),
    steps=5,
    fewest=2,
    explains=("truncation", "all_incorrect", "dead_groups"),
)
def all_truncated(
    window: Window,
    cut_off: Series,
    dead: Series,
    rewards: Series,
    lowest: Series,
    pass_rates: WithGaps,
    *,
    share: float = 0.95,
) -> str | None:
    """Nearly all completions are cut off, and every reward is the same: seen in the first steps."""
    # Every group must be dead and no answer correct: one live group is something to learn from.
    truncated = statistics.fmean(cut_off)
    only = only_value(rewards, lowest)
    if only is None or truncated < share or min(dead) < 1 or mean_of(pass_rates) > 0:
        return None
    return (
        f"{truncated:.0%} of the completions were cut off at max_completion_length over {window.span}, and every "
        f"reward was {only:.3g}: nothing is learned. Raise max_completion_length. If the answers should fit, the "
        "model does not end them: check that the prompts go through the chat template, and that its end-of-turn token "
        "is an EOS token of the tokenizer or of generation_config."
    )


@register_warning(
    "drgrpo/pass_rate",
    also=("completions/clipped_ratio", "reward", "drgrpo/reward_min"),
    steps=20,
    fewest=10,
    explains=("dead_groups",),
)
def all_incorrect(
    window: Window,
    rates: Series,
    cut_off: WithGaps,
    rewards: WithGaps,
    lowest: WithGaps,
) -> str | None:
    """Every completion is incorrect."""
    # Noted for the advice: what was correct once can be looked for in an earlier checkpoint.
    correct_steps = [step for step, rate in zip(window.steps, rates, strict=True) if rate > 0]
    if correct_steps:
        window.memory["last_correct"] = correct_steps[-1]
        return None
    last_correct = window.memory.get("last_correct")
    about_one_value = ""
    if not last_correct:  # a reward that has told answers apart once does read them
        about_one_value = _about_one_value(only_value(rewards, lowest))
    # The likeliest cause first. A completion that was cut off is incorrect for that reason alone.
    truncated = _mostly(cut_off)
    if truncated:
        advice = f", and {truncated:.0%} of them were cut off: raise max_completion_length."
    elif last_correct:
        advice = (
            f"; step {last_correct} had correct ones. Look at the newest completions: if they are broken, go back to "
            "a checkpoint before that step and lower learning_rate; if they look fine, the prompts have become too "
            "hard."
        )
    else:
        advice = (
            ", and no earlier one was correct. Look at completions and their rewards (`trl-drgrpo score`): check that "
            "the reward can read the answers and that correct_threshold can be reached; else use easier prompts, or a "
            "model that solves some of them."
        )
    return f"All completions of {window.span} were incorrect{advice}{about_one_value}"


@register_warning(
    *("reward", "drgrpo/reward_min"),
    also=("drgrpo/pass_rate", "completions/clipped_ratio"),
    steps=30,
    times=2,
    fewest=16,
)
def reward_collapse(
    window: Window,
    rewards: Series,
    lowest: Series,
    rates: WithGaps,
    cut_off: WithGaps,
    *,
    share: float = 0.5,
    deviations: float = 5.0,
) -> str | None:
    """The pass rate, or the reward, has fallen far below its best.

    The mean of the last `steps` readings is compared with the best mean of as many earlier ones. Rewards count from
    the lowest one that any completion has had, so that a shift of all rewards changes nothing.
    """
    # Shares are those of the distance from the lowest reward so far: rewards may be negative.
    floor = min(*lowest, window.memory.get("lowest", math.inf))
    window.memory["lowest"] = floor
    truncated = _mostly(cut_off[-(len(cut_off) // 2) :])
    text = _collapsed(window, "mean reward", "{:.3g}", rewards, floor, share, deviations)
    pass_rates = [rate for rate in rates if rate is not None]
    if len(pass_rates) == len(rates):  # the pass rate is the plainer of two reasons
        text = _collapsed(window, "pass rate", "{:.0%}", pass_rates, 0.0, share, deviations) or text
    if text and truncated:
        text += f" {truncated:.0%} of the completions are cut off now: raise max_completion_length first."
    return text


def _collapsed(
    window: Window,
    name: str,
    form: str,
    values: Series,
    floor: float,
    share: float,
    deviations: float,
) -> str | None:
    """Return the warning for a series whose newest half has fallen below `share` of the best earlier half.

    The best half is kept in the window's memory.
    """
    half = len(values) // 2
    before = values[:half]
    recent = values[-half:]
    best = window.memory.get(name)
    # At the end of a short run halves have another size: one of few values is easily the best by chance.
    is_other_size = best is not None and len(best["values"]) != half
    if best is None or is_other_size or statistics.fmean(before) > statistics.fmean(best["values"]):
        best = {"values": list(before), "step": window.steps[half - 1]}
        window.memory[name] = best
    former = statistics.fmean(best["values"])
    now = statistics.fmean(recent)
    # Two tests: the fall is large, and it is larger than the noise of the series explains.
    has_fallen = now - floor < share * (former - floor)
    if not has_fallen or moved([*best["values"], *recent]) > -deviations:
        return None
    return (
        f"The {name} has collapsed: {form.format(now)} over {span_of(window.steps[-half:])}, down from "
        f"{form.format(former)} over as many up to step {best['step']}. Look at the newest completions. If they are "
        "broken, go back to a checkpoint near that step and lower learning_rate or raise beta. If the prompts get "
        "harder over the run, a lower level is expected."
    )


@register_warning("completions/unique_frac", steps=10, explains=("dead_groups",))
def sampling_collapse(window: Window, unique: Series, *, distinct: float = 0.1) -> str | None:
    """The completions of a group are the same text."""
    # One completion per group is distinct anyway; of the others none (0) to all (1).
    distinct_share = (statistics.fmean(unique) * window.num_generations - 1) / (window.num_generations - 1)
    if distinct_share > distinct:
        return None
    return (
        f"Nearly all completions of a group are the same text (over {window.span} only {distinct_share:.0%} of a "
        "group's further completions differ), so there is nothing to compare. Raise temperature (1.0 is usual), top_p "
        "and top_k; if they are already high, the policy has collapsed: lower learning_rate and go back to an earlier "
        "checkpoint."
    )


@register_warning(
    "drgrpo/dead_groups_frac",
    also=("drgrpo/all_correct_frac", "drgrpo/all_incorrect_frac", "reward", "drgrpo/reward_min"),
    steps=20,
)
def dead_groups(
    window: Window,
    dead: Series,
    correct: WithGaps,
    incorrect: WithGaps,
    rewards: WithGaps,
    lowest: WithGaps,
    *,
    share: float = 0.8,
) -> str | None:
    """Most groups are dead."""
    dead_share = mean_of(dead)
    if dead_share < share:
        return None
    # The advice depends on what most dead groups are: too easy, too hard, or scored alike.
    if mean_of(correct) > dead_share / 2:
        advice = ", most of them all correct: the prompts are too easy. Take harder ones, or stop here."
    elif mean_of(incorrect) > dead_share / 2:
        advice = (
            ", most of them all incorrect: the prompts are too hard. Take easier ones, raise num_generations or "
            "max_completion_length, or add a reward with partial credit; look at the completions to see whether the "
            "reward can be earned at all."
        )
    else:
        advice = (
            ": the rewards within a group are equal. Look at the completions and their rewards; raise "
            "num_generations, or use a reward that tells them apart."
        )
    about_one_value = _about_one_value(only_value(rewards, lowest))
    return f"{dead_share:.0%} of the groups were dead over {window.span}{advice}{about_one_value}"


@register_warning("completions/length_incorrect_mean", "completions/length_correct_mean", steps=40, fewest=20)
def incorrect_grow(
    window: Window,
    incorrect: Series,
    correct: Series,
    *,
    deviations: float = 6.0,
    growth: float = 0.15,
) -> str | None:
    """Incorrect answers get longer while correct ones do not."""
    # Over the window, and not by the noise alone; correct ones may not move by more than two standard errors.
    grew = change(incorrect)
    is_much = grew > growth * statistics.fmean(incorrect[: len(incorrect) // 2]) and moved(incorrect) >= deviations
    if not is_much or moved(correct) > 2:
        return None
    return (
        f"Incorrect completions grew by {grew:.0f} tokens over {window.span} while correct ones did not. The "
        "objective does not favor that: check for a reward that grows with length or steps, for truncation, and for "
        "prompts that have become too hard."
    )


@register_warning("completions/clipped_ratio", steps=40, fewest=8)
def truncation(
    window: Window,
    truncated: Series,
    *,
    share: float = 0.5,
    rise: float = 0.15,
    deviations: float = 6.0,
) -> str | None:
    """Many completions are cut off, or more and more."""
    # Either the level is high, or it rises: a rise is seen long before the level is reached.
    mean = statistics.fmean(truncated)
    rises = change(truncated) >= rise and moved(truncated) >= deviations
    if mean < share and not rises:
        return None
    by_points = f", {change(truncated) * 100:.0f} points more than before" if rises else ""
    return (
        f"{mean:.0%} of the completions were cut off at max_completion_length over {window.span}{by_points}. They are "
        "scored as they stand: raise max_completion_length, add overlong_penalty, or, without step rewards and forks, "
        "set mask_truncated_completions=True, which makes being cut off worth the mean reward."
    )


@register_warning("kl", steps=50, fewest=25)
def kl(
    window: Window,
    divergences: Series,
    *,
    deviations: float = 10.0,
    consecutive: float = 3,
) -> str | None:
    """The KL divergence from the reference leaves its usual range."""
    # Several in a row, and the spread of all before them: single steps leave the usual range in every long run.
    newest = int(consecutive)
    usual = divergences[:-newest]
    last = divergences[-newest:]
    if not usual or min(distance_from_usual(value, usual) for value in last) < deviations:
        return None
    return (
        f"The KL divergence from the reference is {last[-1]:.3g}, far from its usual {statistics.median(usual):.3g}, "
        f"in {newest} optimizer steps in a row. The policy drifts away: lower learning_rate or max_grad_norm, or "
        "raise beta; look at the newest completions, and go back to an earlier checkpoint if they are broken."
    )


@register_warning("rewards/*/failed_frac", "process_rewards/*/failed_frac", steps=10, fewest=3)
def reward_failing(window: Window, *_: Series, share: float = 0.1) -> str | None:
    """A reward function, or a step reward function, fails often."""
    failing = []
    for metric, readings in window.judged.items():
        mean = mean_of([value for _, value in readings])
        if mean >= share:
            name = metric.split("/")[1]
            failing.append(f"{name} ({mean:.0%} over {span_of([step for step, _ in readings])})")
    if not failing:
        return None
    return (
        f"Reward functions fail: {', '.join(failing)}. Such completions are skipped. The first failure's traceback is "
        "in the log; try the reward on logged completions with `trl-drgrpo score`; if it times out, raise its limits."
    )


@register_warning("process/steps_mean", "process/reward_mean", "reward", steps=40, fewest=20)
def process_hacked(
    window: Window,
    steps: Series,
    process: Series,
    outcome: Series,
    *,
    deviations: float = 4.0,
) -> str | None:
    """The process reward rises while the outcome reward falls."""
    # Only the two together: a process reward that rises with the outcome is learning.
    if moved(process) <= deviations or moved(outcome) >= -deviations:
        return None
    risen = "steps per completion and process reward" if moved(steps) > deviations else "the process reward"
    return (
        f"Over {window.span} {risen} rose while the outcome reward fell: the process reward is probably being "
        "exploited. Look at the completions. Set process_role='baseline', which cannot be exploited, raise "
        "outcome_weight, or set step_credit='min_increments', which more steps cannot raise."
    )


@register_warning("sampling/sampling_logp_difference/mean", steps=2, fewest=2, explains=("unequal_weights",))
def lost_sync(window: Window, gaps: Series, *, nats: float = 0.1) -> str | None:
    """vLLM samples from other weights than those that are trained."""
    # In every step of the window: a single odd step proves nothing.
    if min(gaps) < nats:
        return None
    return (
        f"vLLM's log-probabilities differ from the trainer's by {statistics.fmean(gaps):.2g} nats per token over "
        f"{window.span}: it does not generate with the trained weights. A server must serve the trained model in the "
        "same precision (--dtype, --quantization), and no one else may load weights into it. If it does, set "
        "vllm_lora='merged', which sends all weights, and report the difference."
    )


@register_warning(QUARTERS[0], QUARTERS[-1], steps=40, fewest=10)
def unequal_weights(
    window: Window,
    shortest: Series,
    longest: Series,
    *,
    share: float = 0.1,
    deviations: float = 6.0,
) -> str | None:
    """The correction for vLLM's probabilities weighs long rows otherwise than short ones."""
    short = statistics.fmean(shortest)
    long = statistics.fmean(longest)
    # The error of the difference within each step: how much both move together from step to step tells nothing.
    gaps = list(map(operator.sub, shortest, longest))
    error = statistics.pstdev(gaps) / math.sqrt(max(len(gaps) - 1, 1))
    if abs(short - long) < max(share * max(short, long), deviations * error):
        return None
    return (
        f"The correction for vLLM's probabilities weighs the longest quarter of the completions {long:.2f} and the "
        f"shortest {short:.2f} (means over {window.span}): a length bias. Set "
        "vllm_importance_sampling_mode='token_truncate'. If it is set, vLLM and the trainer disagree too much "
        "(sampling/sampling_logp_difference): set the same dtype, vllm serve --logprobs-mode processed_logprobs."
    )


@register_warning("drgrpo/moved_frac", reported_as="nothing_moves", from_logs=True)
def rounded_away(window: Window, shares: Series, *, share: float = 0.5) -> str | None:
    """Many trained weights have not changed in the first optimizer steps.

    The threshold lies in a gap that was measured (share of LoRA-A that changed in 20 steps, base of width 256, see
    `tests/benchmarks/adapter_dtype.py`): in bfloat16 0.4% at learning rate 1e-6, 4.4% at 1e-5, 50% at 1e-4; in float32
    more than 99.9% at each. Wider layers start smaller, so in bfloat16 somewhat more of them moves.
    """
    if shares[-1] >= share:
        return None
    return (
        f"Only {shares[-1]:.2%} of the trained weights that had a gradient have changed in the first optimizer steps: "
        "learning_rate is too small for their precision, updates are rounded away, and most of the training is lost. "
        "Raise it (LoRA: about 1e-5 to 1e-4), or keep trained weights in float32 (adapter_dtype='float32'; of a whole "
        "model model_init_kwargs={'dtype': 'float32'}, which with bf16=True still computes in bfloat16). In float32, "
        "check that the optimizer holds them."
    )


@register_warning("grad_norm", "drgrpo/dead_groups_frac", "learning_rate", steps=10, fewest=2, from_logs=True)
def nothing_moves(window: Window, norms: Series, dead: Series, rates: Series) -> str | None:
    """Groups are live, and the gradient, or the learning rate, is 0 all the same.

    A log has the gradient norm of its last step alone.
    """
    # A schedule that has ended, or a rate of 0, explains a gradient without effect.
    if max(rates) <= 0:
        return (
            f"learning_rate was 0 in every log of {window.span}: nothing is trained. Raise it, or stop here if its "
            "schedule has ended."
        )
    if max(norms) > 0 or max(dead) >= 1:
        return None
    return (
        f"The gradient was 0 in every log of {window.span} although groups were live: nothing is trained. Look for "
        "frozen weights (an inactive adapter, requires_grad=False) and for fully masked completions."
    )
