"""Decoding steps that are recorded once as a CUDA graph, and replayed.

A step of a small batch is thousands of kernels, each done before Python has launched the next one. Over a
[`GroupCache`] of fixed shapes a step is the same kernels over the same memory every time, so they are recorded and
launched at once. A new recording is made when buffers grow or rows leave. A model that waits for its GPU within a
step (to count the tokens of an expert), or whose replay differs from the step itself (it reads more than tokens and
positions), is not recorded: its steps run as before.

Running states are written in place, at fixed addresses. So a step that runs twice, to be recorded or compared, begins
both times from the same states, and a model whose steps put them elsewhere is not recorded.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from trl_drgrpo.features.fast_path.decoding.group_cache import GroupCache, GroupLayer, Refused

Step = Callable[[], torch.Tensor]

# Largest relative difference between running states after a replay and after the step itself: the same kernels over
# the same shapes.
AGREEMENT = 1e-2


class FixedStep:
    """A step whose shapes do not change: it writes one column of the buffers and attends to the whole of them.

    Args:
        layer ([`GroupLayer`]): One of the layers of a window; they have like buffers.

    Attributes:
        column (`torch.Tensor` of shape `(1,)`, int64): The one to write.
        bias (`torch.Tensor` of shape `(P or 1, 1, l + capacity)`, float32): Minus infinity in columns that are not
            seen and at padding: one addition to the scores of a layer for both.
    """

    def __init__(self, layer: GroupLayer):
        self._layer = layer
        padding = layer.prompt_bias()
        device = layer.keys.device
        columns = layer.prompt_values.size(1) + layer.keys.size(3)
        prompts = 1 if padding is None else len(padding)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.bias = torch.empty(prompts, 1, columns, dtype=torch.float32, device=device)

    def point(self) -> None:
        """Point at the next token: it is written, and seen."""
        layer = self._layer
        padding = layer.prompt_bias()
        prompt_columns, completion_columns = layer.seen(layer.tokens + 1)
        columns = layer.prompt_values.size(1)
        prompt_bias = self.bias[:, :, :columns]
        completion_bias = self.bias[:, :, columns:]
        # In place: a recording reads this memory.
        self.column.fill_(layer.tokens - layer.dropped)
        self.bias.fill_(-torch.inf)
        prompt_bias[:, :, prompt_columns] = 0 if padding is None else padding[:, :, prompt_columns]
        completion_bias[:, :, completion_columns] = 0


class Replay:
    """Steps of one generation.

    Args:
        run (`Callable`): From `(n, 1)` tokens and positions to `(n, V)` logits, over the cache.
        groups ([`GroupCache`]): The cache, after its first step. Its steps have fixed shapes from here on.
        differs (`Callable`, *optional*): What is wrong with logits, given the expected ones; `None`: nothing. Asked
            about the first step that is replayed.
    """

    def __init__(
        self,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        groups: GroupCache,
        differs: Callable[[torch.Tensor, torch.Tensor], str | None] | None,
    ):
        self._run = run
        self._groups = groups
        self._differs = differs
        self._recorded_over: tuple[Any, list[int]] | None = None  # grid, and addresses of buffers
        self._again: Step | None = None

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Runs one more step.

        Raises:
            [`Refused`]: The model cannot be recorded. Nothing of the step has been counted: it can be run otherwise.
        """
        layers = self._groups.groups
        for layer in layers:
            layer.make_room(layer.keys, layer.values)
        states = self._running_states()
        # A recording is bound to a grid and to addresses. Values grow together with keys.
        buffers = [layer.keys for layer in layers] + states
        memory = (self._groups.grid, [buffer.data_ptr() for buffer in buffers])
        is_new = memory != self._recorded_over
        if is_new:
            self._again = None  # frees its memory
            self._recorded_over = memory
            # Shapes are fixed from here on, until buffers grow or rows leave. Layers of one window share a step.
            self._fixed = {layer.window: FixedStep(layer) for layer in layers}
            for layer in layers:
                layer.fixed = self._fixed[layer.window]
            self._tokens = tokens.clone()
            self._positions = positions.clone()
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        for fixed in self._fixed.values():
            fixed.point()
        # A step that is recorded a second time, or compared, begins again from the same states.
        values = []
        if is_new or self._differs is not None:
            values = [state.clone() for state in states]
        logits = self._recorded(values) if is_new else self._replayed(values)
        if [state.data_ptr() for state in self._running_states()] != [state.data_ptr() for state in states]:
            self._put_back(values)
            raise Refused("its steps put running states elsewhere")
        for layer in layers:
            layer.tokens += 1
        return logits

    def _running_states(self) -> list[torch.Tensor]:
        states: list[torch.Tensor | None] = []
        for layer in self._groups.states:
            states += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return [state for state in states if state is not None]  # some layers have convolutions alone

    def _put_back(self, values: list[torch.Tensor]) -> None:
        for state, value in zip(self._running_states(), values, strict=True):
            state.copy_(value)

    def _run_again(self) -> torch.Tensor:
        return self._run(self._tokens, self._positions)

    def _recorded(self, values: list[torch.Tensor]) -> torch.Tensor:
        device = self._tokens.device
        # Twice: a kernel may wait once, when it is loaded.
        with suppress(RuntimeError):
            logits, self._again = record(self._run_again, device)
            return logits
        self._put_back(values)
        try:
            logits, self._again = record(self._run_again, device)
        except RuntimeError as error:
            self._put_back(values)
            raise Refused(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        return logits

    def _replayed(self, values: list[torch.Tensor]) -> torch.Tensor:
        assert self._again is not None
        logits = self._again()
        if self._differs is None:
            return logits
        # The first replay is compared with the step itself, from the same states: by its logits, and by its states.
        replayed = [state.clone() for state in self._running_states()]
        self._put_back(values)
        expected_logits = self._run_again()
        wrong = self._differs(logits, expected_logits)
        for state, expected in zip(replayed, self._running_states(), strict=True):
            tolerance = AGREEMENT * expected.abs().max().item()
            if not torch.allclose(state, expected, rtol=AGREEMENT, atol=tolerance):
                wrong = wrong or "its running states differ"
        if wrong:
            self._put_back(values)
            raise Refused(wrong)
        self._differs = None
        return logits


def record(step: Step, device: torch.device) -> tuple[torch.Tensor, Step]:
    """
    Runs a step, and records it.

    Returns:
        What it gave, and a function that runs it again and gives the same tensor with new values.

    Raises:
        `RuntimeError`: It waits for the GPU, does something else that cannot be recorded, or does not fit.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        # A capture needs a stream of its own: CUDA refuses it on the default one.
        stream = _stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                # A step before the recording loads kernels, and the work space of matrix products on this stream. It
                # finds out what waits, too: a recording that fails leaves more behind than a step that does.
                with _refusing_to_wait():
                    first = step()
                recorded = _captured(graph, step)
        finally:
            current.wait_stream(stream)
        first.record_stream(current)  # its memory is not given away while the current stream reads it

    def again() -> torch.Tensor:
        with torch.cuda.device(device):
            graph.replay()
        return recorded

    return first, again


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Inside, whatever waits for the GPU is a `RuntimeError`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _captured(graph: torch.cuda.CUDAGraph, step: Step) -> torch.Tensor:
    """Captures a step on the current stream; the tensor that it gives when it is replayed."""
    torch.cuda.empty_cache()  # a capture cannot use what is cached there, an older recording's memory for one
    pool = torch.cuda.graph_pool_handle()
    collects = gc.isenabled()
    gc.disable()  # an older graph that is collected meanwhile ends a capture
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            return step()
        finally:
            graph.capture_end()
    except RuntimeError:
        # In torch 2.11 the allocator and the generator of random numbers still take themselves for captured.
        device = torch.cuda.current_device()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(device, pool)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        if collects:
            gc.enable()


_streams: dict[int, torch.cuda.Stream] = {}  # by device: a work space is kept for each


def _stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]
