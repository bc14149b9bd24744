"""The hooks through which this package steps into `GRPOTrainer`. `batches.py` has what they are handed.

Nothing of TRL is named here. `trl_overrides.py` calls the hooks of the trainer ([`Hooks`]). A [`Feature`] defines
those that it needs, by name:

- `@event`: every feature that defines it is called, in their order;
- `@context`: the contexts of all these features are entered, in their order;
- `@owned`: the one feature that defines it is called; without one, the body here runs;
- no decorator: for the trainer alone. A subclass overrides it.

A subclass of the trainer may override all of them; `super()` then calls the features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, cast

import torch
from transformers import PreTrainedModel, TrainerCallback

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.upstream.batches import CreditedBatch, DatasetRow, Metrics, Rollouts, ScoredBatch

if TYPE_CHECKING:
    from trl_drgrpo.objective.loss_terms import LossTokens
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol

Completions = tuple[list[list[int]], list[list[float]] | None]  # token ids, and log-probabilities of some backends
Hook = TypeVar("Hook", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")
Model = TypeVar("Model", bound=PreTrainedModel)


class Generate(Protocol):
    """Samples one completion per prompt of the list, in which each prompt stands `num_generations` times in a row.

    `limits`: most tokens of each completion; those of the run by default. A backend may exceed them.
    """

    def __call__(
        self, prompt_ids: list[list[int]], num_generations: int, limits: Sequence[int] | None = None
    ) -> Completions: ...


class CardArguments(TypedDict, total=False):
    """Arguments of `create_model_card`."""

    model_name: str | None
    dataset_name: str | None
    tags: str | list[str] | None


_OWNED: list[str] = []  # names of the hooks that one feature may own

# The body of a decorated hook never runs, but for that of an owned one without an owner. Where a subclass of the
# trainer overrides a hook, its `super()` goes to the features by the decorator.


def event(hook: Hook) -> Hook:
    """Make a hook that every feature with a method of its name hears."""

    @wraps(hook)
    def tell(self: "Hooks", *args: Any, **kwargs: Any) -> None:
        for _, method in self.methods_of_features(hook.__name__):
            method(*args, **kwargs)

    return cast(Hook, tell)


def context(hook: Callable[Arguments, None]) -> Callable[Arguments, AbstractContextManager[None]]:
    """Make a hook whose context enters that of every feature with a method of its name."""

    @wraps(hook)
    @contextmanager
    def enter(self: "Hooks", *args: Any, **kwargs: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for _, method in self.methods_of_features(hook.__name__):
                stack.enter_context(method(*args, **kwargs))
            yield

    return cast(Callable[Arguments, AbstractContextManager[None]], enter)


def owned(hook: Hook) -> Hook:
    """Make a hook that goes to the one feature with a method of its name; without one, the hook itself runs."""
    _OWNED.append(hook.__name__)

    @wraps(hook)
    def ask(self: "Hooks", *args: Any, **kwargs: Any) -> object:
        method = self.owner_of(hook.__name__)
        return hook(self, *args, **kwargs) if method is None else method(*args, **kwargs)

    return cast(Hook, ask)


class Hooks:
    """The interface that `trl_overrides.py` calls."""

    features: Sequence["Feature"] = ()

    @property
    def loss_terms(self) -> list["LossTerm"]:
        """Additional terms of the loss among the features."""
        return [feature for feature in self.features if isinstance(feature, LossTerm)]

    def methods_of_features(self, hook: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Name of each feature that defines a hook, and its method."""
        for feature in self.features:
            if hasattr(feature, hook):
                yield type(feature).__name__, getattr(feature, hook)

    def owner_of(self, hook: str) -> Callable[..., Any] | None:
        """Method of the one feature that defines a hook; an `InputError` where two do."""
        owners = list(self.methods_of_features(hook))
        if len(owners) > 1:
            names = " and ".join(name for name, _ in owners)
            remedy = "Leave one of them out of trainer.features."
            raise InputError("features", f"{names}, which both define {hook}", "one owner of it", remedy)
        return owners[0][1] if owners else None

    def check_owners(self) -> None:
        """Refuse two owners of one hook, and a feature that was passed to another trainer since."""
        for hook in _OWNED:
            self.owner_of(hook)
        for feature in self.features:
            # A trainer writes itself into its features, so the newest one has the object.
            if getattr(feature, "trainer", self) is not self:
                got = f"{type(feature).__name__}, which was passed to another trainer since"
                raise InputError(
                    "features", got, "an object of its own per trainer", "Pass the class, or a new object."
                )

    def load_policy(self, load: Callable[..., Model], name: str, options: dict[str, Any]) -> Model:
        """Loads the policy, or its reference, by name, as TRL's `load` does with these options."""
        return load(name, **options)

    def load_reward_model(self, load: Callable[..., Model], name: str, options: dict[str, Any]) -> Model:
        """Loads a reward model by name, likewise."""
        return load(name, **options)

    def on_built(self, trainable_values: dict[str, torch.Tensor]) -> None:
        """Called at the end of TRL's constructor with the values of trainable parameters from before TRL cast them."""

    # A generation batch

    @context
    def making_batch(self) -> None:
        """Entered around all that makes a generation batch, which may take several rounds."""

    @owned
    def collecting(self, inputs: list[DatasetRow], generate: Callable[[list[DatasetRow]], Rollouts]) -> Rollouts:
        """Makes a scored generation batch of this rank's rows; may call `generate` for other rows, and more often."""
        return generate(inputs)

    @event
    def on_rows(self, rows: Sequence[DatasetRow]) -> None:
        """Sees this rank's rows of the data before completions are made of them, in each round of a batch."""

    @context
    def rolling_out(self) -> None:
        """Entered around the making of a batch's completions: generation, turns with tools, custom rollouts."""

    @owned
    def completing(self, prompt_ids: list[list[int]], num_generations: int, generate: Generate) -> Completions:
        """Makes the first completions of a batch's rows, where prompts are text; may call `generate` for other rows,
        and more often."""
        return generate(prompt_ids, num_generations)

    @context
    def generating(self, limits: Sequence[int] | None = None) -> None:
        """Entered around each generation with the policy; `limits` as in [`Generate`]."""

    @event
    def on_turns_begin(self, rows: Sequence[int]) -> None:
        """Called when rows of this rank begin a turn of the model: first all, then those that got a tool's result."""

    @context
    def scoring(self) -> None:
        """Entered around each call of the reward functions."""

    def on_rewards(self, batch: ScoredBatch) -> None:
        """Sees a generation batch right after the reward functions did."""

    def on_rollouts(self, batch: ScoredBatch, rollouts: Rollouts) -> Rollouts:
        """May edit a scored generation batch before it is split into micro-batches. `batch`: what `on_rewards` saw;
        `rollouts`: this rank's rows of it."""
        return rollouts

    @event
    def on_credit(self, batch: CreditedBatch) -> None:
        """Sees each generation batch with its advantages, on every rank."""

    # A micro-batch

    @owned
    def on_micro_batch(self, inputs: Rollouts) -> Rollouts:
        """May replace the micro-batch that is due in training, and those behind it in `buffered_rollouts`."""
        return inputs

    @context
    def computing_loss(self, inputs: Rollouts) -> None:
        """Entered around the loss of a micro-batch."""

    @owned
    def loss_without_forward(self, inputs: Rollouts) -> torch.Tensor | None:
        """The loss of a micro-batch that needs no forward; `None` for all others."""
        return None

    def loss_constants(self, inputs: Rollouts) -> dict[str, float]:
        """Attributes of the trainer that `_compute_loss` shall read with another value for this micro-batch."""
        return {}

    @owned
    def loss_metrics(self, inputs: Rollouts, metrics: Metrics) -> Metrics:
        """May edit what `_compute_loss` logged for a micro-batch."""
        return metrics

    @event
    def on_grad_norm(self, grad_norm: float) -> None:
        """Sees the norm of each optimizer step's gradient, as it was before clipping, before the step is taken."""

    # Logs, checkpoints and the Hub

    @context
    def writing(self, folder: Path) -> None:
        """Entered around all that is written into a folder, a checkpoint's or the model's, on every rank."""

    @event
    def add_to_log(self, logs: dict[str, float]) -> None:
        """May add to what is about to be logged."""

    @event
    def on_checkpoint_begun(self, checkpoint: Path) -> None:
        """Called on every rank before anything of a checkpoint is written."""

    @owned
    def completing_checkpoint(self, checkpoint: Path) -> None:
        """Called on every rank after TRL wrote a checkpoint, before it is uploaded and older ones are deleted."""

    @event
    def on_checkpoint_saved(self, checkpoint: Path, limit: int | None) -> None:
        """Called on every rank when a checkpoint is complete and its upload has begun. `limit`: `save_total_limit`,
        which nobody else applies."""

    @event
    def on_checkpoint_loaded(self, checkpoint: Path) -> None:
        """Called on every rank after optimizer and scheduler were restored, before the first step."""

    @owned
    def on_model_saved(self, folder: Path) -> None:
        """Called on every rank after the model, or its adapter, was saved."""

    @owned
    def writing_card(self, arguments: CardArguments) -> AbstractContextManager[CardArguments]:
        """Entered around TRL's writing of a card; gives the arguments that TRL shall get."""
        return nullcontext(arguments)

    @context
    def opening_repository(self) -> None:
        """Entered around the opening of the repository on the Hub."""

    @context
    def pushing(self) -> None:
        """Entered around an upload that the run waits for."""

    @owned
    def on_failed_uploads(self, errors: list[BaseException]) -> None:
        """Called on the main process with what went wrong in uploads that ran beside the training."""


class Feature(TrainerCallback):
    """Something that plugs into the trainer: a transformers callback that may define hooks of [`Hooks`], too.

    A feature owns its state. The trainer builds it, lists it in `trainer.features` and adds it to its callbacks, so
    it hears of steps, logs and evaluations as any callback does. It reads `trainer.args` and never imports the
    configuration.

    Args:
        trainer ([`DrGRPOTrainer`]): The trainer it belongs to; not built yet.

    Attributes:
        trainer ([`TrainerProtocol`]): The part of the trainer that features may use.
        takes (`tuple[str, ...]`): Arguments read once, when the trainer is built: assigned later they come too late.
    """

    takes: tuple[str, ...] = ()
    trainer: "TrainerProtocol"  # set by the trainer, at the latest

    def __init__(self, trainer: "TrainerProtocol | None" = None):
        if trainer is not None:
            self.trainer = trainer

    def on_trainer_built(self) -> None:
        """The trainer is built: its model, its rewards and their names are known."""

    def around_train(self) -> AbstractContextManager[None]:
        """Entered around `train()`; the features that are listed first are the outer ones."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any] | None:
        """State that a checkpoint keeps, JSON-ready; `None`: nothing. Asked on the main process."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores what `state_dict` returned, on every rank; `None`: the checkpoint holds none."""


class LossTerm(Feature):
    """A loss per token beside that of Dr. GRPO, or in its place; summed and divided by the same constant `B * L`.

    A term must depend on single tokens, on whole rows, or on earlier batches. The gradient of an optimizer step is
    then a sum over rows, so skipping, regrouping and packing rows leave it as it is. A mean, a rank or a quantile over
    the micro-batch breaks that. `trl-drgrpo check --loss_term my_terms.py:MyTerm` tries it.

    Attributes:
        reads_all_rows (`bool`): Set it where rows without any advantage have a loss, too. They are not skipped then.
        replaces_policy_loss (`bool`): Set it where the term is the policy's loss itself, with weights of its own for
            the ratio. The clipped loss is then left out. KL and other terms stay. vLLM's importance sampling
            correction weighs it as it does the clipped loss; other terms it does not.

    Example: an SFT term on the rows that did better than their group.

    ```python
    class LikelyWhenRight(LossTerm):
        def per_token_loss(self, tokens):
            return -0.1 * tokens.logps * (tokens.advantages > 0)

    trainer = DrGRPOTrainer(..., features=[LikelyWhenRight])
    ```
    """

    reads_all_rows: bool = False
    replaces_policy_loss: bool = False

    @property
    def name(self) -> str:
        """Name in logs and messages: `loss_term/<name>`."""
        return type(self).__name__

    def per_token_loss(self, tokens: "LossTokens") -> torch.Tensor:
        """Return the loss of each token `(B, T)`, to be minimized; values outside of `tokens.mask` are ignored."""
        raise NotImplementedError
