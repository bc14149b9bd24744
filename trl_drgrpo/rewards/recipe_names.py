"""Names of rewards in recipes: one entry per name, and `register_reward`, which adds one.

Each file registers its own rewards, below them. The modules that do so are listed in `REGISTRATIONS` of the package,
and are imported when the first name is looked up. A file in `rewards/functions` need not be listed.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trl_drgrpo.common.errors import shortened
from trl_drgrpo.common.registry import Entry, Registry

Role = Literal["outcome", "wrapper", "adapter", "step"]


@dataclass(frozen=True)
class NamedReward(Entry):
    """A reward that recipes name. The arguments are those of [`register_reward`]."""

    reward: Callable | str | None
    factory: Callable | str | None
    usual_options: Mapping[str, Any] | None
    role: Role
    is_harmless: bool

    @property
    def stands_alone(self) -> bool:
        """Tell if the name needs no options."""
        return self.reward is not None or self.usual_options is not None


REWARDS: Registry[NamedReward] = Registry("reward")


def register_reward(
    name: str,
    reward: Callable | str | None = None,
    *,
    help: str,
    factory: Callable | str | None = None,
    usual_options: Mapping[str, Any] | None = None,
    role: Role = "outcome",
    is_harmless: bool = False,
) -> None:
    """
    Give a reward a name for recipes, flags and [`resolve_reward`].

    Args:
        name (`str`): The name: a letter or `_`, then letters, digits, `_` and `-`.
        reward (`Callable` or `str`, *optional*): The reward function that the name alone stands for, or where it is,
            as `"package.module:attribute"`, which is imported on first use. Without it the name needs options.
        help (`str`): One sentence for the help of the command line: what it scores.
        factory (`Callable` or `str`, *optional*): Class or function that makes the reward from options, in the same
            forms. Without it the name takes no options.
        usual_options (`Mapping[str, Any]`, *optional*): Options of `factory` that the name alone stands for.
        role (`str`, *optional*, defaults to `"outcome"`): `"wrapper"` for a reward around others, `"adapter"` for one
            that calls the function of another library, `"step"` for a step reward function.
        is_harmless (`bool`, *optional*, defaults to `False`): Whether the options name neither code nor a server. Then
            commands take them from the recipe in a run's folder without `--trust_recipe`.

    Raises:
        [`InputError`]: A name that is taken, no help, an unknown role, usual options without a factory, or neither
            reward nor factory.
    """
    # Told when the name is registered, and not when a recipe uses it.
    if reward is None and factory is None:
        got = "neither reward nor factory"
        raise REWARDS.error(name, got, "one of them", "Pass the reward function.")
    if inspect.isclass(reward):
        got = f"reward={reward.__name__}, which is a class"
        remedy = "Pass the class as factory=, or an instance of it as reward=."
        raise REWARDS.error(name, got, "a function", remedy)
    if role not in get_args(Role):
        raise REWARDS.error(name, f"role={role!r}", f"one of {', '.join(get_args(Role))}", "Pick one of them.")
    if usual_options is not None and not (factory is not None and isinstance(usual_options, Mapping)):
        got = f"usual_options={shortened(usual_options)}"
        raise REWARDS.error(name, got, "a mapping, beside a factory", "Pass the factory that takes them.")
    for home in (reward, factory):  # the form of a text is checked; what it names is imported on first use
        if home is not None:
            REWARDS.check_home(name, home)
    REWARDS.add(NamedReward(name, help, reward, factory, usual_options, role, is_harmless))
