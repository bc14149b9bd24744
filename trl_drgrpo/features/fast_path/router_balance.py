"""Load-balancing loss of a mixture of experts over a whole generation batch (arXiv 2501.11873).

The loss of a batch is `N * sum_e f_e * P_e`, as in transformers: over the tokens of all layers with N experts, f_e is
the mean number of times that expert e is among the k most probable ones, and P_e the mean of its probability. Only P_e
has a gradient. TRL takes each micro-batch for the batch. Here the generation batch is the batch:

- f_e is counted once per generation batch, before its first loss and without gradient. Prompt and completion tokens of
  all rows on all ranks count, as TRL counts them in a micro-batch; padding does not;
- with f_e fixed, the loss is a sum over tokens, so any split of the rows into micro-batches has the same gradient.
  A micro-batch divides it by the mean number of tokens of all micro-batches, so each token weighs the same, and the
  mean over the optimizer steps of a generation batch is the loss of the whole batch;
- later iterations over the batch (`num_iterations`) keep f_e, as they keep the old log-probabilities.

An evaluation trains nothing and logs TRL's loss. The weights `N * f_e` per token travel in the micro-batches, so a
checkpoint between two optimizer steps of a generation batch holds them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.fast_path.noise import without_noise
from trl_drgrpo.features.fast_path.window import PLAN
from trl_drgrpo.upstream.batches import EXPERT_WEIGHTS, ScoredTokens, TokenBatch, unknown_keys
from trl_drgrpo.upstream.hooks import Feature
from trl_drgrpo.upstream.kv_cache import without_adapters

_FIELD = "router_aux_scope"
_TRL_SCOPE = "'micro_batch', TRL's scope"
_AGREEMENT = 0.02  # relative; TRL rounds probabilities to the dtype of the model


class Score(Protocol):
    """Scores tokens in one forward of the model."""

    def __call__(self, model: Any, tokens: TokenBatch) -> ScoredTokens: ...


class RouterBalance(Feature):
    """Counts how often experts are chosen in a generation batch, and weighs the loss of its micro-batches by that."""

    def __init__(self, trainer: Any = None):
        super().__init__(trainer)
        self._experts_per_token = 0
        self._expert_weights: torch.Tensor | None = None  # of the micro-batch whose loss is being computed
        self._loss: torch.Tensor | None = None  # of its tokens
        self._counts: _Counts | None = None  # while a generation batch is counted
        self.row_counts = torch.zeros(0)  # `(N, W)`, rows that contain each token of the forward that runs

    def on_trainer_built(self) -> None:
        if not self.trainer.aux_loss_enabled:
            remedy = "Remove it. A mixture of experts has the loss where router_aux_loss_coef is not 0."
            raise InputError(_FIELD, "'batch' with a model without load-balancing loss", _TRL_SCOPE, remedy)
        config = self.trainer.model.config.get_text_config()
        self._experts_per_token = config.num_experts_per_tok  # TRL reads it under this name, too
        if not self.trainer.in_lockstep:  # there, the parameters are whole only in a forward of the wrapped model
            self._refuse_another_loss()

    def _refuse_another_loss(self) -> None:
        """Refuse a model whose loss on a few tokens is not the one of this module."""
        model = self.trainer.model
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.arange(24, device=self.trainer.accelerator.device).view(2, 12) % vocabulary
        mask = torch.ones_like(ids)
        mask[0, :5] = 0  # padding, which must not count
        tokens = TokenBatch(ids, mask, 4, options={"compute_aux_loss": True})
        self._counts = _Counts(self._experts_per_token)
        with torch.no_grad(), without_noise(model), self._recording(model, mask):
            expected = self.trainer.score_as_trl(model, tokens)[2]
        counts = self._counts
        self._counts = None
        if expected is None:
            raise InputError(_FIELD, "'batch' with a model without this loss", _TRL_SCOPE, "Remove it.")
        loss = counts.weights(counts.totals, micro_batches=1) @ counts.probabilities
        if not torch.isclose(loss.float(), expected.float(), rtol=_AGREEMENT, atol=0.0):
            got = f"'batch' with {type(model).__name__}, whose loss on a few tokens is {expected:.4g}, not {loss:.4g}"
            raise InputError(_FIELD, got, _TRL_SCOPE, "This model has another load-balancing loss: remove it.")

    @contextmanager
    def computing_loss(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Give tokens of the micro-batch the weight that they have in its generation batch, see [`Hooks`]."""
        self._expert_weights = inputs.get(EXPERT_WEIGHTS)
        self._loss = None
        try:
            yield
        finally:
            self._expert_weights = None
            self._loss = None

    def scored(self, model: Any, tokens: TokenBatch, score: Score) -> ScoredTokens:
        """Score tokens. In training, the loss is that of this module where TRL asks for its own."""
        if self._counts is None and self._expert_weights is None:
            return score(model, tokens)
        # TRL must not ask the model for its loss: with packs, the model would compute it with a mask of another shape.
        tokens = replace(tokens, options={**tokens.options, "compute_aux_loss": False})
        with self._recording(model, tokens.attention_mask):
            log_probs, entropies, _ = score(model, tokens)
        return log_probs, entropies, self._loss

    @contextmanager
    def _recording(self, model: Any, row_counts: torch.Tensor) -> Iterator[None]:
        """Read the router in the one forward inside the block. It runs padded rows, or packs that set `row_counts`."""
        self.row_counts = row_counts
        unwrapped = self.trainer.accelerator.unwrap_model(model)
        backbone = without_adapters(unwrapped).base_model

        # The backbone is asked, not the model: that would compute its own loss, with a mask that packs do not have.
        def ask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "output_router_logits": True}

        def read(module: Any, args: Any, output: Any) -> None:
            for logits in output.router_logits:  # one per layer
                self._read_layer(logits.flatten(0, -2), self.row_counts.reshape(-1).to(logits.device))

        before = backbone.register_forward_pre_hook(ask, with_kwargs=True)
        after = backbone.register_forward_hook(read)
        with before, after:
            yield

    def _read_layer(self, logits: torch.Tensor, row_counts: torch.Tensor) -> None:
        # TRL's are of the dtype of the model. In float32 at least, packs and padded rows agree more often on ties.
        probabilities = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        # A token that several rows of a pack share counts once for each of them, and padding 0 times.
        of_experts = row_counts.to(probabilities.dtype) @ probabilities  # (N,)
        if self._counts is not None:
            self._counts.add(probabilities, row_counts, of_experts)
        elif self._expert_weights is not None:
            loss = of_experts @ self._expert_weights.to(of_experts)
            if self._loss is not None:  # of earlier layers, which may be on another device
                loss = self._loss + loss.to(self._loss.device)
            self._loss = loss

    @contextmanager
    def counting(self, micro_batches: Sequence[Any]) -> Iterator[None]:
        """Count the choices of the forwards inside the block, which run each row of the generation batch once, and
        put the weights into its micro-batches."""
        media = [name for name in unknown_keys(micro_batches[0]) if name != PLAN]
        if media:
            remedy = "The pass that counts the experts' loads reads text alone: remove router_aux_scope."
            raise InputError(_FIELD, f"'batch' with micro-batches of {', '.join(media)}", _TRL_SCOPE, remedy)
        self._counts = _Counts(self._experts_per_token)
        try:
            yield
            counts = self._counts
        finally:
            self._counts = None
        # Shares of the experts are those of all ranks: a batch is one, however many processes make it.
        accelerator = self.trainer.accelerator
        totals: Any = accelerator.reduce(counts.totals, "sum")
        weights = counts.weights(totals, len(micro_batches) * accelerator.num_processes)
        for inputs in micro_batches:
            inputs[EXPERT_WEIGHTS] = weights


class _Counts:
    """Choices of experts over the tokens of all layers. A token of several rows counts for each of them.

    Attributes:
        totals (`torch.Tensor` of shape `(N + 1,)`, int64): How often each expert is chosen, and the tokens.
        probabilities (`torch.Tensor` of shape `(N,)`): Sum of the probabilities of each expert.
    """

    def __init__(self, experts_per_token: int):
        self._experts_per_token = experts_per_token
        self.totals = torch.zeros(0, dtype=torch.int64)
        self.probabilities = torch.zeros(0)

    def add(
        self,
        probabilities: torch.Tensor,
        row_counts: torch.Tensor,
        of_experts: torch.Tensor,
    ) -> None:
        """Add the tokens of a layer in one forward: `(tokens, N)`, `(tokens,)`, and their product `(N,)`."""
        choices = probabilities.topk(self._experts_per_token, dim=-1).indices  # (tokens, k)
        counts_of_choices = row_counts.repeat_interleave(self._experts_per_token)
        totals = row_counts.new_zeros(probabilities.size(-1) + 1)
        totals.index_add_(0, choices.flatten(), counts_of_choices)
        totals[-1] = row_counts.sum()
        if not len(self.totals):  # the number of experts is known from the first layer on
            self.totals = torch.zeros_like(totals)
            self.probabilities = torch.zeros_like(of_experts)
        self.totals += totals.to(self.totals.device)
        self.probabilities += of_experts.detach().to(self.probabilities.device)

    def weights(self, totals: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """Return the loss of a token's probability of each expert `(N,)`: `N * f_e`, over layers times the mean number
        of tokens of a micro-batch.

        Args:
            totals (`torch.Tensor` of shape `(N + 1,)`): Of all ranks.
            micro_batches (`int`): Those of the generation batch on all ranks.
        """
        choices = totals[:-1].to(self.probabilities.dtype)
        tokens = totals[-1].to(self.probabilities.dtype)
        # A token is counted once per layer, so the mean is over tokens and layers, as in transformers.
        frequencies = choices / tokens
        return len(choices) * frequencies / (tokens / micro_batches)
