"""The study of prompts that carry signal: its starts, the sizes of a run, and its arms."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Start:
    """Problems to start on.

    Args:
        title (`str`): In tables.
        terms (`tuple[int, int]`): Fewest and most digits of a sum; they decide how many the model solves.
        max_completion (`int`): Tokens of a completion at most.
        tokens (`int`): Completion tokens that a run generates.
    """

    title: str
    terms: tuple[int, int]
    max_completion: int
    tokens: int


@dataclass(frozen=True)
class SignalSettings:
    """Settings that all arms share.

    Args:
        starts (`dict[str, Start]`): By name.
        prompts, num_generations (`int`): Groups of an optimizer step, and completions of a group.
        learning_rate (`float`): Of AdamW, constant.
        different_prompts (`int`): Training problems of a seed; they come again and again.
        held_out (`int`): Problems of an evaluation, the same in all runs.
        evaluations (`int`): Of a run, at equal distances in tokens, the one before training not counted.
    """

    starts: dict[str, Start]
    prompts: int = 8
    num_generations: int = 8
    learning_rate: float = 3e-4
    different_prompts: int = 128
    held_out: int = 256
    evaluations: int = 3


SETTINGS = SignalSettings(
    {
        "low": Start("few correct", (5, 6), 72, 80_000),
        "middle": Start("half correct", (3, 3), 40, 40_000),
    }
)


@dataclass(frozen=True)
class Arm:
    """One way to fill batches.

    Args:
        fields (`dict`): Of [`DrGRPOConfig`].
        raised (`bool`): Whether the learning rate is multiplied by the factor that is hidden in DAPO's mean, as the
            run `FACTOR_OF` of the same start and seed had it on average.
    """

    fields: dict[str, Any]
    raised: bool = False

    @property
    def label(self) -> str:
        """Its settings, as Markdown."""
        settings = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in self.fields.items()) or "plain"
        return settings + (", learning rate x factor" if self.raised else "")


PLAIN, FACTOR_OF = "plain", "dapo"
ARMS = {
    PLAIN: Arm({}),
    "dynamic": Arm({"dynamic_sampling": True}),
    FACTOR_OF: Arm({"dynamic_sampling": "dapo"}),
    "curriculum": Arm({"curriculum": True}),
    "both": Arm({"dynamic_sampling": True, "curriculum": True}),
    "plain_raised": Arm({}, raised=True),
    "dynamic_raised": Arm({"dynamic_sampling": True}, raised=True),
}
