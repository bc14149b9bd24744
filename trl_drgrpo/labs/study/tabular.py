r"""Rung a: the length bias in a policy of two numbers, where nothing else can be the cause.

A completion falls into one of two states that the policy sees: correct (probability 0.4) or incorrect (0.6). The state
cannot be learned. In each state one number is learned, the rate at which it stops, so the length is geometric, cut at
64 tokens. The reward is 1 in the correct state, whatever the length: an unbiased objective has no reason to move
either rate.

The expected change of a state's rate is proportional to `E[c_i * score_i | state]`. With a constant divisor
`E[A | state]` factors out and the score has mean 0: nothing but noise. With `1 / |o_i|` long completions weigh less
than short ones, the weighted score has a mean other than 0, and its sign is that of the advantage: correct answers
shrink, incorrect ones grow. GRPO without std does it too: the cause is the length, not the std.
"""

from dataclasses import dataclass, field

import numpy as np

from trl_drgrpo.labs.study.objectives import OBJECTIVES, Objective

RIGHT, WRONG = 0, 1


@dataclass(frozen=True)
class TabularTask:
    """Sizes of the experiment.

    Args:
        prompts (`int`): P, prompts per step.
        num_generations (`int`): G, completions per prompt.
        max_length (`int`): Tokens at most; also L.
        right_probability (`float`): How often a completion is correct; not learnable.
        start_length (`float`): Mean length of both states at the start, before the cut, in tokens.
        learning_rate (`float`): Of Adam, on the logits of the stopping rates.
        steps (`int`): Optimizer steps.
    """

    prompts: int = 16
    num_generations: int = 8
    max_length: int = 64
    right_probability: float = 0.4
    start_length: float = 8.5
    learning_rate: float = 0.01
    steps: int = 400


@dataclass
class TabularRun:
    """Result of one objective with one seed.

    Args:
        objective (`str`): A key of `OBJECTIVES`.
        seed (`int`): Of the random numbers.
        length_right, length_wrong (`list[float]`): Expected length in tokens given the state, exact from the policy,
            before each step and after the last.
    """

    objective: str
    seed: int
    length_right: list[float] = field(default_factory=list)
    length_wrong: list[float] = field(default_factory=list)


def expected_length(stop_logits: np.ndarray, max_length: int) -> np.ndarray:
    """Mean of a geometric length cut at `max_length`: `(1 - (1 - p)^T) / p` tokens, elementwise.

    Args:
        stop_logits (`np.ndarray`): Logits of the stopping rate p.
        max_length (`int`): T.
    """
    stop = 1 / (1 + np.exp(-np.asarray(stop_logits, dtype=np.float64)))
    return (1 - (1 - stop) ** max_length) / stop


def length_scores(lengths: np.ndarray, stopped: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """`d log pi(o) / d logit` of completions: `1 - p` for the token that stops, `-p` for each that goes on.

    Args:
        lengths (`np.ndarray` of shape `(B,)`): Tokens, the stopping one included.
        stopped (`np.ndarray` of shape `(B,)`, bool): False where the cut ended the completion.
        stop (`np.ndarray` of shape `(B,)`): The stopping rate p of each row's state.
    """
    return stopped * (1 - stop) - (lengths - stopped) * stop


def run_tabular(objective: str, seed: int, task: TabularTask = TabularTask()) -> TabularRun:
    """Train the two stopping rates with one objective.

    Args:
        objective (`str`): A key of `OBJECTIVES`.
        seed (`int`): Of the random numbers; equal seeds see equal states.
        task ([`TabularTask`]): Sizes.

    Returns:
        [`TabularRun`].
    """
    rng = np.random.default_rng(seed)
    start = np.log(1 / (task.start_length - 1))  # the logit of 1 / start_length
    logits, adam = np.full(2, start), _Adam(task.learning_rate)
    run = TabularRun(objective, seed)
    for _ in range(task.steps):
        _note(run, logits, task)
        logits = adam.step(logits, _gradient(OBJECTIVES[objective], logits, task, rng))
    _note(run, logits, task)
    return run


def length_drift(prompts: int, batches: int = 5000, seed: int = 0) -> dict[str, np.ndarray]:
    """Expected update of the stopping rates at the start, in units of its standard deviation from batch to batch.

    Args:
        prompts (`int`): Groups in a batch; DAPO's divisor depends on it.
        batches (`int`, *optional*, defaults to `5000`): Drawn batches; a 0 has standard error `1 / sqrt(batches)`.
        seed (`int`, *optional*, defaults to `0`): Of the random numbers.

    Returns:
        `dict[str, np.ndarray]`: Per key of `OBJECTIVES`, of the rate of correct answers, of incorrect ones, and of one
        rate shared by both, `(3,)`. Positive: answers get shorter.
    """
    task, rng = TabularTask(prompts=prompts), np.random.default_rng(seed)
    stop = np.full(prompts * task.num_generations, 1 / task.start_length)
    updates: dict[str, list[list[float]]] = {name: [] for name in OBJECTIVES}
    for _ in range(batches):
        is_right = rng.random(len(stop)) < task.right_probability
        drawn = rng.geometric(stop)
        lengths = np.minimum(drawn, task.max_length)
        scores = length_scores(lengths, drawn <= task.max_length, stop)
        for name, objective in OBJECTIVES.items():
            rewards = is_right.astype(float)
            terms = scores * objective.token_weights(rewards, lengths, task.num_generations, task.max_length)
            updates[name].append([terms[is_right].sum(), terms[~is_right].sum(), terms.sum()])
    return {name: np.mean(found, axis=0) / np.std(found, axis=0) for name, found in updates.items()}


def _gradient(objective: Objective, logits: np.ndarray, task: TabularTask, rng: np.random.Generator) -> np.ndarray:
    """Ascent direction for the two logits from one batch of rollouts."""
    rows = task.prompts * task.num_generations
    states = np.where(rng.random(rows) < task.right_probability, RIGHT, WRONG)
    stop = (1 / (1 + np.exp(-logits)))[states]
    drawn = rng.geometric(stop)
    lengths = np.minimum(drawn, task.max_length)
    weights = objective.token_weights(
        (states == RIGHT).astype(float), lengths, task.num_generations, loss_normalizer=task.max_length
    )
    contributions = weights * length_scores(lengths, drawn <= task.max_length, stop)
    return np.bincount(states, weights=contributions, minlength=2)


def _note(run: TabularRun, logits: np.ndarray, task: TabularTask) -> None:
    right, wrong = expected_length(logits, task.max_length)
    run.length_right.append(float(right))
    run.length_wrong.append(float(wrong))


class _Adam:
    """Adam as published (arXiv 1412.6980), ascending."""

    def __init__(self, learning_rate: float, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8):
        self.learning_rate, self.beta1, self.beta2, self.epsilon = learning_rate, beta1, beta2, epsilon
        self.mean: np.ndarray | float = 0.0
        self.square: np.ndarray | float = 0.0
        self.steps = 0

    def step(self, parameters: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        self.steps += 1
        self.mean = self.beta1 * self.mean + (1 - self.beta1) * gradient
        self.square = self.beta2 * self.square + (1 - self.beta2) * gradient**2
        mean = self.mean / (1 - self.beta1**self.steps)
        square = self.square / (1 - self.beta2**self.steps)
        return parameters + self.learning_rate * mean / (np.sqrt(square) + self.epsilon)
