"""The phases of a training step, run on a skeleton with two and with three layers, and continued to the full depth.

In each segment of a phase (the forward, the head, the backward of the last layer and of the first) live bytes grow by
the same amount per layer, so two depths give every other one exactly; a peak over segments is the largest of straight
lines. A model whose layers differ is run at its full depth instead.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from trl_drgrpo.single_gpu.memory import passes
from trl_drgrpo.single_gpu.memory.passes import Peaks
from trl_drgrpo.single_gpu.memory.setup import Setup
from trl_drgrpo.single_gpu.memory.shapes import Shape, scored_shapes, trained_shapes
from trl_drgrpo.single_gpu.memory.skeleton import Skeleton, build


class Phases:
    """Peaks of a model's phases, in bytes above what is there all the time.

    Args:
        config: Of the text model.
        setup ([`Setup`]): The run.
    """

    def __init__(self, config: Any, setup: Setup):
        self.config = config
        self.full = build(config, setup)
        self._shallow: dict[int, Skeleton] = {}
        self._known: dict[tuple[str, Setup, Shape | None], int] = {}
        self._setup = setup
        layers = self.full.layers
        kinds = {tuple((n, tuple(p.shape)) for n, p in layer.named_parameters()) for layer in layers}
        kinds_of_attention = set(getattr(config, "layer_types", None) or ())
        self.is_uniform = len(kinds) == 1 and len(kinds_of_attention) <= 1

    def train(self, setup: Setup, gradients: int = 0, roughly: bool = False) -> tuple[int, int]:
        """
        Forward, backward and, in a step's first micro-batch, the gradients that come to be.

        `gradients`: bytes of those that a later micro-batch finds. `roughly`: only the micro-batch of most tokens, a
        lower bound. Returns bytes of the micro-batch that needs most, and of the gradients it finds.
        """
        found = []
        shapes = trained_shapes(self.config, setup)
        for shape in [max(shapes, key=lambda each: each.packs * each.width)] if roughly else shapes:
            run = partial(passes.train, shape=shape)
            found.append((self._continued("train", run, _decisive(setup), shape), gradients * shape.later))
        return max(found, key=sum)

    def score(self, setup: Setup) -> int:
        """Log-probabilities without gradient: of the policy where they are needed, else of the reference."""
        shapes = {replace(each, later=False) for each in trained_shapes(self.config, setup)}
        if setup.reference or setup.vllm or setup.generates_elsewhere:  # rows are scored before any is left out
            shapes |= {replace(each, later=False) for each in scored_shapes(self.config, setup)}
        adapters = setup.scores_old
        name = "score" if adapters else "score without adapters"
        runs = {each: partial(passes.score, shape=each, adapters=adapters) for each in shapes}
        return max(self._continued(name, run, _decisive(setup), each) for each, run in runs.items())

    def generate(self, setup: Setup) -> int:
        """Sampling the first and the last token of a generation batch, with its cache of keys and values."""
        return self._continued("generate", passes.generate, _generating(setup))

    def cache(self, setup: Setup) -> int:
        """Bytes of keys and values of a whole generation batch."""
        return self._continued("cache", passes.cache_bytes, _generating(setup))

    def _continued(
        self, name: str, run: Callable[[Skeleton, Setup], Peaks], setup: Setup, shape: Shape | None = None
    ) -> int:
        key = (name, setup, shape)
        if key not in self._known:
            depth = self.config.num_hidden_layers
            if not self.is_uniform or depth <= 3:
                peaks = run(self.full, setup)
            else:
                two, three = run(self._at(2), setup), run(self._at(3), setup)
                peaks = {segment: two[segment] + (depth - 2) * (three[segment] - two[segment]) for segment in two}
            self._known[key] = max(peaks.values())
        return self._known[key]

    def _at(self, layers: int) -> Skeleton:
        if layers not in self._shallow:
            self._shallow[layers] = build(self.config, self._setup, layers)
        return self._shallow[layers]


def _decisive(setup: Setup) -> Setup:
    """A setup without what its shapes say: equal ones are run once."""
    return replace(
        setup, prompt=1, completion=1, batch=1, group=1, accumulation=1, steps_per_generation=1, iterations=1
    )


def _generating(setup: Setup) -> Setup:
    """A setup whose one batch is a whole generation batch."""
    return replace(setup, batch=setup.generated_rows, accumulation=1, steps_per_generation=1)
