"""The mathematics once more, in float64 Python loops. Imports nothing from the package: an oracle must not know the
answer.

Rows are lists; `None` or NaN is an unscorable reward.
"""

import math


def scorable(reward):
    return reward is not None and not math.isnan(reward)


def group_advantages(rewards, num_generations, baseline):
    """`r_i - b`, zero for unscorable rows and for groups that carry no signal."""
    advantages = []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations]
        known = [float(r) for r in group if scorable(r)]
        for i, reward in enumerate(group):
            if not scorable(reward) or len(known) < 2 or min(known) == max(known):
                advantages.append(0.0)
            elif baseline == "group_mean":
                advantages.append(float(reward) - sum(known) / len(known))
            else:
                others = [float(r) for j, r in enumerate(group) if j != i and scorable(r)]
                advantages.append(float(reward) - sum(others) / len(others))
    return advantages


def token_loss(logp, old_logp, advantage, epsilon_low, epsilon_high, beta, ref_logp):
    """`-min(rho A, clip(rho) A) + beta k3`."""
    ratio = math.exp(logp - old_logp)
    clipped = min(max(ratio, 1 - epsilon_low), 1 + epsilon_high)
    loss = -min(ratio * advantage, clipped * advantage)
    if beta:
        loss += beta * (math.exp(ref_logp - logp) - (ref_logp - logp) - 1)
    return loss


def token_loss_slope(logp, old_logp, advantage, epsilon_low, epsilon_high, beta, ref_logp):
    """Derivative of `token_loss` with respect to `logp`."""
    ratio = math.exp(logp - old_logp)
    is_clipped = (ratio > 1 + epsilon_high and advantage > 0) or (ratio < 1 - epsilon_low and advantage < 0)
    slope = 0.0 if is_clipped else -ratio * advantage
    if beta:
        slope += beta * (1 - math.exp(ref_logp - logp))
    return slope


def dr_grpo(logps, old_logps, advantages, mask, normalizer, epsilon_low, epsilon_high, beta, ref_logps):
    """Loss and its gradient with respect to each log-probability, as nested lists."""
    total, gradient = 0.0, []
    for i, row in enumerate(logps):
        gradient.append([])
        for t, logp in enumerate(row):
            slope = 0.0
            if mask[i][t]:
                advantage = advantages[i][t] if isinstance(advantages[i], list) else advantages[i]
                reference = ref_logps[i][t] if beta else 0.0
                arguments = (logp, old_logps[i][t], advantage, epsilon_low, epsilon_high, beta, reference)
                total += token_loss(*arguments)
                slope = token_loss_slope(*arguments)
            gradient[i].append(slope / (len(logps) * normalizer))
    return total / (len(logps) * normalizer), gradient


def step_token_advantages(step_rewards, step_ends, mask, num_generations, credit, baseline):
    """By the definition, token by token: sums over the steps that end at or after the token."""
    if baseline == "to_go" or credit == "min_increments":
        return compared_from_the_same_step(step_rewards, step_ends, mask, num_generations, credit, baseline)
    result = []
    for i, row in enumerate(step_rewards):
        first = i - i % num_generations
        group = step_rewards[first : first + num_generations]
        everything = [s for other in group for s in other if scorable(s)]
        silent = baseline != "none" and (not everything or min(everything) == max(everything))
        result.append([])
        for t, is_trained in enumerate(mask[i]):
            value = 0.0
            ahead = [k for k in range(len(row)) if step_ends[i][k] >= t]
            if is_trained and ahead and not silent:
                known = [k for k in ahead if scorable(row[k])]
                counted = known if credit == "return_to_go" else [k for k in known if k == ahead[0]]
                for k in counted:
                    b = step_baseline(group, i - first, k, baseline)
                    value += 0.0 if b is None else row[k] - b
            result[-1].append(value)
    return result


def compared_from_the_same_step(step_rewards, step_ends, mask, num_generations, credit, baseline):
    """What each row earns from a step on, minus the mean of what the other rows of its group earn from there on."""
    result = []
    for i, row in enumerate(step_rewards):
        first = i - i % num_generations
        others = [step_rewards[j] for j in range(first, first + num_generations) if j != i]
        result.append([])
        for t, is_trained in enumerate(mask[i]):
            ahead = [k for k in range(len(row)) if step_ends[i][k] >= t]
            value = 0.0
            if is_trained and ahead and (others or baseline == "none"):
                value = earned_from(row, ahead[0], credit)
                if baseline == "to_go":
                    value -= sum(earned_from(other, ahead[0], credit) for other in others) / len(others)
            result[-1].append(value)
    return result


def earned_from(row, k, credit):
    """What is paid at step k and later; 0 behind the last step."""
    if credit == "min_increments":
        before = [s for s in row[:k] if scorable(s)]
        whole = [s for s in row if scorable(s)]
        return (min(whole) if whole else 0.0) - (min(before) if before else 0.0) if k < len(row) else 0.0
    counted = row[k : k + 1] if credit == "immediate" else row[k:]
    return sum(s for s in counted if scorable(s))


def step_baseline(group, i, k, baseline):
    """`b`, or `None` where there is nothing to take a mean of."""
    if baseline == "none":
        return 0.0
    if baseline == "per_completion":
        rows = [[s for s in row if scorable(s)] for row in group]
        values = [sum(row) / len(row) for row in rows if row]
    elif baseline == "same_index":
        values = [row[k] for row in group if len(row) > k and scorable(row[k])]
    else:
        kept = [row for j, row in enumerate(group) if not (baseline == "pooled_others" and j == i)]
        values = [s for row in kept for s in row if scorable(s)]
    return sum(values) / len(values) if values else None


def forked_token_advantages(rewards, num_generations, branches, cuts, mask):
    """Token by token: what the rows earn that are the same up to here, less what the rows of the siblings do."""
    return [
        [
            among_siblings(rewards, i, sum(cut <= t for cut in cuts[i]), num_generations, branches, len(cuts[i]))
            if is_trained
            else 0.0
            for t, is_trained in enumerate(mask[i])
        ]
        for i in range(len(rewards))
    ]


def forked_step_advantages(step_rewards, step_ends, num_generations, branches, cuts, credit):
    """The same step by step, of what rows earn from the step on."""
    return [
        [
            among_siblings(
                [earned_from(row, k, credit) for row in step_rewards],
                i,
                sum(cut <= end for cut in cuts[i]),
                num_generations,
                branches,
                len(cuts[i]),
            )
            for k, end in enumerate(step_ends[i])
        ]
        for i in range(len(step_rewards))
    ]


def among_siblings(values, i, level, num_generations, branches, depth):
    """Mean over the rows of row i's node, less the mean over its siblings of theirs; `level` forks lie before it. 0 in
    a group with an unscorable row."""
    size = branches ** (depth - level)  # rows of a node
    family = num_generations if level == 0 else size * branches  # rows of all its siblings
    first = i - i % family
    group = i - i % num_generations
    if not all(map(scorable, values[group : group + num_generations])):
        return 0.0
    own, others = 0.0, []
    for start in range(first, first + family, size):
        mean = sum(map(float, values[start : start + size])) / size
        if start <= i < start + size:
            own = mean
        else:
            others.append(mean)
    return own - sum(others) / len(others)


def balance_loss(counted_logits, trained_logits, rows, step_rows, slots, slots_of_step, top):
    """Load-balancing loss of an optimizer step, with the choices of experts counted over its generation batch.

    Args:
        counted_logits, trained_logits: Called with a row's token ids: for each layer the router's logits, a tensor
            `(tokens, N)`, when the batch was sampled and now, with gradient.
        rows, step_rows: Token ids of each row, prompt and completion, of the generation batch and of the step.
        slots, slots_of_step: Micro-batches of the generation batch, and of the step.
        top: Experts that a token chooses.
    """
    choices, tokens, layers = {}, 0, 0
    for row in rows:
        tokens += len(row)
        layers = len(counted_logits(row))
        for logits in counted_logits(row):
            for token in logits.tolist():
                by_probability = sorted(range(len(token)), key=lambda expert, token=token: -token[expert])
                for expert in by_probability[:top]:
                    choices[expert] = choices.get(expert, 0) + 1
    loss = 0.0
    for row in step_rows:
        for logits in trained_logits(row):
            for probabilities in logits.softmax(dim=-1):
                for expert, times in choices.items():
                    frequency = times / (tokens * layers)
                    mean_tokens = tokens / slots * slots_of_step
                    loss = loss + len(probabilities) * frequency * probabilities[expert] / (mean_tokens * layers)
    return loss
