"""The registry of formats of process reward models. `register_prm_format` in `named.py` fills it."""

from dataclasses import dataclass

from trl_drgrpo.common.registry import Registry


@dataclass(frozen=True)
class PRMFormat:
    """A format of process reward models. The arguments are those of [`register_prm_format`]."""

    name: str
    help: str
    scorer: type | str
    is_causal: bool | None
    published_ids: str | None
    architecture: str | None


FORMATS: Registry[PRMFormat] = Registry("PRM format")


def format_of_scorer(scorer: type) -> PRMFormat | None:
    """Return the format of a scorer's class, or of the nearest base class that has one."""
    for base in scorer.__mro__:
        for prm_format in FORMATS.values():
            if prm_format.scorer in (base, f"{base.__module__}:{base.__qualname__}"):
                return prm_format
    return None
