"""Registries as they were, after a test that has registered names."""

from contextlib import contextmanager

from trl_drgrpo.features.diagnostics.run_warnings import CAUSES
from trl_drgrpo.process_rewards.named import FORMATS
from trl_drgrpo.rewards.recipe_names import REWARDS

REGISTRIES = (REWARDS, FORMATS, CAUSES)


@contextmanager
def restored():
    before = [(registry, dict(registry), dict(registry.registered_by)) for registry in REGISTRIES]
    try:
        yield
    finally:
        for registry, entries, registered_by in before:
            registry._entries = entries
            registry.registered_by = registered_by
