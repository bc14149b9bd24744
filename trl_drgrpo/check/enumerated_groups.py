"""Expected gradients of forked groups and of chosen prompts, by enumeration; and advantages as a trainer has them.

**Forks**: every parent, every branch of every cut, every group. A parent is a row of a small policy. It is cut where a
rule says so, and further branches are rows of the same policy that begin alike, each with its probability given what
it begins with. Rows carry texts, so the trainer cuts them into steps as in training, and the rules are those of
training (`features/forks.py`).

**Prompts**: every order, every group, every choice. Three prompts, each with a pass rate and a logit of its own; a
batch draws them without repetition, up to all three. They are enumerated for the model as it is and as it is later,
when it passes more often: the two gradients stand in one vector, so a factor that changes as the model learns is no
learning rate.

**Credit** (`TrainerCredit`): token ids in, `compute_advantages` out.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, permutations, product
from math import comb, prod
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

from trl_drgrpo.check.tabular_policies import (
    BAD,
    GOOD,
    GROUP_SIZES,
    SEPARATOR,
    Credit,
    Gradients,
    Objective,
    Rows,
    SmallPolicy,
    Trajectory,
)
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.features.forks import boundaries, first_above
from trl_drgrpo.host_proof.recording import DEFAULTS
from trl_drgrpo.host_proof.tiny import tiny_model, tiny_tokenizer
from trl_drgrpo.objective.advantages import group_advantages, keep_probability, select_groups
from trl_drgrpo.objective.fork_advantages import Forks
from trl_drgrpo.process_rewards.step_scorer import log_nothing
from trl_drgrpo.trainer import DrGRPOTrainer
from trl_drgrpo.upstream.batches import RolloutBatch, ScoredBatch

# Row, tokens before its last cut -> tokens before the next one; `None`: it has no further cut.
Rule = Callable[[Trajectory, int], int | None]
# Rows, G, cuts -> advantages (B, T).
ForkedCredit = Callable[[Rows, int, Forks], torch.Tensor]
PARENTS = 2


@dataclass(frozen=True)
class Tree:
    """One parent with all branches sampled from its cuts.

    Args:
        leaves (`tuple[int, ...]` of length `b ** D`): Rows of the policy; those of a node are consecutive.
        cuts (`tuple` of `b ** D` tuples of `D` ints): Tokens of each leaf before its forks.
        probability (`float`): Of this tree.
    """

    leaves: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    probability: float


def behind_the_first_step(row: Trajectory, after: int) -> int | None:
    """Cut of `fork_at="drawn"` in a first batch; a further cut lies behind the second step, and so on."""
    places = _places(row)
    # Places stand in for doubts, since each is above 0: the first one behind `after` is taken.
    return first_above(places, places, 0.0, after)


def behind_a_bad_step(row: Trajectory, after: int) -> int | None:
    """Cut behind the first bad step, that of `fork_at="doubt"` with an exact judge."""
    lines = str(row.text).splitlines()
    doubts = [float(line.startswith(BAD)) for line in lines]
    return first_above(_places(row), doubts, 0.5, after)


def only_failures(row: Trajectory, after: int) -> int | None:
    """Cut behind the first step of rows that fail in the end: the choice depends on tokens behind the cut."""
    if row.outcome:
        return None
    return behind_the_first_step(row, after)


def compare_forked(
    policy: SmallPolicy,
    credit: ForkedCredit,
    objective: Objective,
    rule: Rule = behind_the_first_step,
    *,
    depth: int = 1,
    branches: int = 2,
    share: Callable[[int], float] = lambda group_size: 1.0,
) -> Iterator[Gradients]:
    """Enumerate the groups of two parents.

    Args:
        policy ([`SmallPolicy`]): The policy to enumerate; its rows have texts.
        credit (`Callable`): Advantages `(B, T)` of rows in groups.
        objective (`Callable`): Its gradient is the exact one.
        rule (`Callable`, *optional*): The rule by which rows are cut.
        depth, branches (`int`): D and b.
        share (`Callable`, *optional*): As in [`compare`].

    Returns:
        Iterator over pairs: the expected gradient, and the exact one.
    """
    group_size = PARENTS * branches**depth
    leaves = []
    cuts = []
    chances = []
    trees_of_a_parent = _trees(policy, rule, branches, depth)
    for trees in product(trees_of_a_parent, repeat=PARENTS):
        group = _joined(trees)
        leaves.append(group.leaves)
        cuts += group.cuts
        chances.append(group.probability)
    # One call for all groups: the credit of a group does not depend on the others.
    rows = [policy.rows[leaf] for leaf in chain(*leaves)]
    advantages = credit(rows, group_size, Forks(branches, cuts))
    advantages = advantages.view(len(leaves), group_size, -1)
    probabilities = torch.tensor(chances, dtype=torch.float64)
    gradient = policy.expected_gradient(leaves, advantages, probabilities)
    yield gradient / share(group_size), policy.gradient(objective)


def trained_in_one_leaf(credit: ForkedCredit) -> ForkedCredit:
    """Return the same credit, with each shared token in the first of its leaves alone, where it weighs 1 of G."""

    def once(rows: Rows, num_generations: int, forks: Forks) -> torch.Tensor:
        advantages = credit(rows, num_generations, forks).clone()
        for i, cuts in enumerate(forks.cuts):
            for level, cut in enumerate(cuts):
                # Leaves of a node are consecutive, so every multiple of their number is a node's first leaf.
                leaves_of_node = forks.branches ** (forks.depth - level)
                if i % leaves_of_node:
                    advantages[i, :cut] = 0.0
        return advantages

    return once


def over_all_leaves(credit: Credit) -> ForkedCredit:
    """Return credit that takes leaves for independent rows."""
    return lambda rows, num_generations, forks: credit(rows, num_generations)


def _trees(policy: SmallPolicy, rule: Rule, branches: int, depth: int) -> Iterator[Tree]:
    """Yield every tree of one parent."""
    chances = policy.probabilities().tolist()

    def forked(leaf: int, cuts: tuple[int, ...], probability: float) -> Iterator[Tree]:
        """Yield all trees below a leaf that was cut `len(cuts)` times."""
        if len(cuts) == depth:
            yield Tree((leaf,), (cuts,), probability)
            return
        row = policy.rows[leaf]
        text = str(row.text)
        cut = rule(row, max(cuts, default=0))
        # Rows that a branch may become, with their chances.
        siblings = {}
        for i, candidate in enumerate(policy.rows):
            if cut is None:  # nowhere: branches are the same text, though perhaps not all of them scorable
                is_sibling = candidate.text == text
            else:
                is_sibling = str(candidate.text).startswith(text[:cut])
            if is_sibling:
                siblings[i] = chances[i]
        if cut is None:
            cut = len(row.log_probs)
        cuts = (*cuts, cut)
        chance_of_beginning = sum(siblings.values())
        # The parent goes on as it was sampled; the other branches are sampled given what they begin with.
        for sampled in product(siblings, repeat=branches - 1):
            chance = prod(siblings[i] / chance_of_beginning for i in sampled)
            subtrees = [forked(branch, cuts, 1.0) for branch in (leaf, *sampled)]
            for trees in product(*subtrees):
                yield _joined(trees, probability * chance)

    for parent, chance in enumerate(chances):
        yield from forked(parent, (), chance)


def _joined(trees: Sequence[Tree], probability: float = 1.0) -> Tree:
    """Return independent trees beside each other as one."""
    leaves: tuple[int, ...] = ()
    cuts: tuple[tuple[int, ...], ...] = ()
    chance = 1.0
    for tree in trees:
        leaves += tree.leaves
        cuts += tree.cuts
        chance *= tree.probability
    return Tree(leaves, cuts, probability * chance)


def _places(row: Trajectory) -> list[int]:
    """Tokens before each place where a row can be cut: a character is a token."""
    ends = []
    for k, character in enumerate(str(row.text)):
        if character == SEPARATOR:
            ends.append(k)
    return boundaries(ends, len(row.log_probs))


# Prompts -------------------------------------------------------------------------------------------------------------

NOW = (0.05, 0.3, 0.8)  # pass rates of the three prompts
LATER = (0.5, 0.6, 0.95)
GROUPS = 2  # of a batch: fewer than prompts, so that the choice matters
CURRICULUM_Q_MIN = 0.2


def chosen_prompts(
    dynamic: bool = True,
    estimates: Sequence[float] | None = None,
    weighted: bool = True,
    mean_over_live: bool = False,
) -> Iterator[Gradients]:
    """Yield the expected and the exact gradient of batches that are filled by a rule, for each group size.

    Args:
        dynamic (`bool`, *optional*, defaults to `True`): Draw until groups are live.
        estimates (`Sequence[float]`, *optional*): Pass rates as the curriculum estimates them.
        weighted (`bool`, *optional*, defaults to `True`): Whether groups are weighted by their inverse probability.
        mean_over_live (`bool`, *optional*, defaults to `False`): DAPO's weights.
    """
    keep_chances = [1.0] * len(NOW)
    if estimates is not None:
        keep_chances = [keep_probability(estimate, CURRICULUM_Q_MIN) for estimate in estimates]
    orders = list(permutations(range(len(NOW))))

    def expected(rates: Sequence[float], group_size: int) -> torch.Tensor:
        """Return the expected gradient, `(prompts,)`, of a model with these pass rates."""
        draws_of_prompts = []
        for rate, keep_chance in zip(rates, keep_chances, strict=True):
            draws = []
            if keep_chance != 1:  # the curriculum skips the prompt: no group, no gradient
                draws.append(Draw(1 - keep_chance, False, 0.0))
            for group in _groups(rate, group_size):
                chance = keep_chance * group.probability
                is_candidate = group.is_candidate or not dynamic
                draws.append(Draw(chance, is_candidate, group.gradient))
            draws_of_prompts.append(draws)
        gradients = torch.zeros(len(rates), dtype=torch.float64)
        for order in orders:
            # Weights are the inverse of these chances; without them all groups weigh the same.
            weights = None
            if weighted:
                weights = [keep_chances[prompt] for prompt in order]
            ordered_draws = [draws_of_prompts[prompt] for prompt in order]
            for draws in product(*ordered_draws):
                candidates = [draw.is_candidate for draw in draws]
                selection = select_groups(
                    candidates,
                    GROUPS,
                    len(draws),
                    weights,
                    mean_over_live=mean_over_live,
                )
                probability = prod(draw.probability for draw in draws) / len(orders)
                # The i-th draw is of the i-th prompt in this order.
                for i, weight in zip(selection.draws, selection.weights, strict=True):
                    prompt = order[i]
                    gradients[prompt] += probability * weight * draws[i].gradient / GROUPS
        return gradients

    for group_size in GROUP_SIZES:
        gradients = [expected(NOW, group_size), expected(LATER, group_size)]
        yield torch.cat(gradients), _exact_now_and_later()


class Draw(NamedTuple):
    """One result of drawing a prompt.

    Args:
        probability (`float`): Of this result.
        is_candidate (`bool`): Whether the group may enter the batch.
        gradient (`float`): Of the prompt's logit; 0 where the group was not generated or has equal rewards.
    """

    probability: float
    is_candidate: bool
    gradient: float


def retried_until_mixed() -> Iterator[Gradients]:
    """Sample each prompt again until its rewards differ: hard prompts weigh more."""
    for group_size in GROUP_SIZES:
        gradients = []
        for rate in (*NOW, *LATER):
            gradient = 0.0
            probability = 0.0
            for group in _groups(rate, group_size):
                if group.is_candidate:
                    gradient += group.probability * group.gradient
                    probability += group.probability
            # The sums run over live groups alone, so their probability is made up for.
            gradients.append(gradient / probability / len(NOW))
        yield torch.tensor(gradients, dtype=torch.float64), _exact_now_and_later()


def _groups(rate: float, group_size: int) -> list[Draw]:
    """Draws of a prompt, one for each number of correct completions; candidates are groups with different rewards."""
    groups = []
    for correct in range(group_size + 1):
        rewards = (torch.arange(group_size) < correct).double()
        advantages = group_advantages(rewards, group_size, "leave_one_out")
        # Binomial, with the probability that exactly so many of G completions are correct.
        probability = comb(group_size, correct) * rate**correct * (1 - rate) ** (group_size - correct)
        # A prompt's completion is one decision with logit z: d log p / dz is 1 - rate if correct, else -rate.
        scores = rewards - rate
        gradient = (advantages * scores).mean().item()
        is_live = bool((advantages != 0).any())
        groups.append(Draw(probability, is_live, gradient))
    return groups


def _exact_now_and_later() -> torch.Tensor:
    """Gradient of the mean pass rate over the prompts, once for each model."""
    rates = torch.tensor([NOW, LATER], dtype=torch.float64)
    logits = torch.logit(rates).requires_grad_()
    # Each model's mean has a gradient in its own logits alone, so one sum gives both.
    means = logits.sigmoid().mean(dim=1)
    return torch.autograd.grad(means.sum(), logits)[0].flatten()


# Credit --------------------------------------------------------------------------------------------------------------

# The texts of a row's steps -> a reward, or a value, per step.
Judge = Callable[[Sequence[str]], Sequence[float | None]]


def good_steps(steps: Sequence[str]) -> list[float]:
    """Score a good step 1, a bad one 0."""
    return [float(step.startswith(GOOD)) for step in steps]


def seen_steps(steps: Sequence[str]) -> list[float | None]:
    """Score the same, but leave out a step that holds no mark: an EOS alone, as process reward models have it."""
    scores = {GOOD: 1.0, BAD: 0.0}
    return [scores.get(step[0]) for step in steps]


class TrainerCredit:
    """The credit of a `DrGRPOTrainer`, which is built at the first call.

    Rows with a text are cut into steps and scored as in training; of others the steps are taken as they are.

    Args:
        judge (`Callable`, *optional*): The step reward function; `None`: outcome rewards only.
        fitted (`float`, *optional*): Coefficient of a value baseline, as earlier batches have fitted it.
        settings: Fields of the configuration.
    """

    def __init__(
        self,
        judge: Judge | None = good_steps,
        *,
        fitted: float | None = None,
        **settings: Any,
    ):
        self.judge = judge
        self.fitted = fitted
        self.settings = {"step_separator": [SEPARATOR], **DEFAULTS, **settings}
        self.tokenizer = tiny_tokenizer()
        self._ids: dict[Trajectory, list[int]] = {}
        self._scored: dict[Trajectory, Trajectory] = {}

    def __call__(
        self,
        rows: Rows,
        num_generations: int,
        forks: Forks | None = None,
    ) -> torch.Tensor:
        """Advantages `(B, T)` of one generation batch: rows in groups of `num_generations`, which may be forked."""
        self._read(rows)
        ids = [self._ids[row] for row in rows]
        rows = [self._scored[row] for row in rows]
        tokens = [torch.ones_like(row.log_probs, dtype=torch.long) for row in rows]
        mask = pad_sequence(tokens, batch_first=True)  # (B, T)
        if self.settings.get("mask_truncated_completions"):
            # As TRL does: a row that was cut off keeps its reward and loses its tokens.
            mask = mask * torch.tensor([[row.closing] for row in rows])
        rewards = torch.tensor([row.outcome for row in rows], dtype=torch.float64)
        scored = ScoredBatch(
            rewards_per_func=rewards.unsqueeze(1),
            inputs=[{"prompt": ""}] * len(rows),
            prompts=[""] * len(rows),
            completions=[row.text or "" for row in rows],
            completion_ids=ids,
        )
        step_fields = {}
        if self.judge is not None:
            step_fields["step_rewards"] = []
            step_fields["step_ends"] = []
            for row in rows:
                # A closing step, an EOS alone, has an end but no reward of its own.
                scores = list(row.step_rewards)
                if row.closing:
                    scores.pop()
                step_fields["step_rewards"].append(scores)
                step_fields["step_ends"].append(list(row.step_ends))
        if rows[0].state_keys:
            step_fields["state_keys"] = [list(row.state_keys) for row in rows]
        batch = RolloutBatch(
            scored=scored,
            rewards=rewards,
            completion_mask=mask,
            trained_mask=mask,
            num_generations=num_generations,
            own_rows=slice(0, len(rows)),
            training=False,  # nothing is remembered: in an enumeration the batch before is not an independent one
            forks=forks,
            **step_fields,
        )
        trainer = self.trainer  # built outside of the block: its model and tables are float32
        # Advantages of tokens have the default dtype. float32, which TRL's loss takes, would blur a fitted c.
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            advantages = trainer.compute_advantages(batch)
        finally:
            torch.set_default_dtype(default)
        if advantages.dim() == 1:
            return advantages.unsqueeze(1) * mask
        return advantages

    @cached_property
    def trainer(self) -> DrGRPOTrainer:
        """A trainer of the tiny model; it never trains."""
        judge = self.judge or good_steps

        def judge_all(steps: Sequence[Sequence[str]], **kwargs: object) -> list[Sequence[float | None]]:
            return list(map(judge, steps))

        with tempfile.TemporaryDirectory() as output_dir:
            trainer = DrGRPOTrainer(
                model=tiny_model(self.tokenizer),
                reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
                args=DrGRPOConfig(output_dir=output_dir, **self.settings),
                train_dataset=Dataset.from_dict({"prompt": ["?"] * 8}),
                processing_class=self.tokenizer,
                step_reward_funcs=judge_all if self.judge else None,
            )
        if self.fitted is not None:
            # c is products / squares, over so many squares that the batch at hand hardly moves it.
            sums = {"squares": 1024.0, "products": 1024.0 * self.fitted}
            trainer.earlier.value_baseline.load_state_dict(sums)
        return trainer

    def _read(self, rows: Rows) -> None:
        """Tokenize rows, and let the trainer cut them into steps and score those.

        An enumeration repeats its few rows in many groups, so each is read once.
        """
        written = []
        for row in dict.fromkeys(rows):
            if row in self._scored:
                continue
            self._scored[row] = row
            self._ids[row] = [0] * len(row.log_probs)
            if row.text is not None:
                text = row.text
                if row.closing:
                    text += str(self.tokenizer.eos_token)
                self._ids[row] = self.tokenizer.encode(text)
                written.append(row)
        scorer = self.trainer.step_scorer
        if scorer is None or not written:
            return
        ids = [self._ids[row] for row in written]
        scores = scorer.score(ids, [None] * len(ids), self.tokenizer, log_nothing)
        for row, steps, ends, rewards in zip(written, scores.steps, scores.ends, scores.rewards, strict=True):
            closing = steps.closing is not None
            if closing:
                rewards = [*rewards, 0.0]  # a step of an EOS alone is paid 0
            self._scored[row] = replace(
                row,
                step_ends=tuple(ends),
                step_rewards=tuple(rewards),
                closing=closing,
            )
