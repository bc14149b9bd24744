"""The exact fast path: the same gradient for a fraction of the work (math.md, section 4). Glue only.

After each generation the micro-batches of every optimizer step are planned anew (`micro_batch_planner.py`,
`window.py`): rows without advantage are skipped, the others regrouped by length, cut to their own extent and, where
the model allows it, packed so that prompts and other common prefixes run once (`pack_layout.py`, `sharing.py`);
tokens alone tell who shares what. Old log-probabilities are computed after that, for the rows that will be trained on.
Generation runs each prompt once (`decoding/`).

All of it is exact for this package's objective and no other, so each step stands aside where it would not be.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from trl_drgrpo.features.fast_path.decoding.decoder import shared_prefill
from trl_drgrpo.features.fast_path.micro_batch_planner import Budget, Costs, MicroBatch
from trl_drgrpo.features.fast_path.pack_layout import MaskForm, Packed, pack_rows, rows_of, scored_only
from trl_drgrpo.features.fast_path.rebatching import why_not_rebatched
from trl_drgrpo.features.fast_path.sharing import (
    costs_of,
    mask_form,
    rope_depends_on_width,
    starts_from_states,
    why_not_shared,
)
from trl_drgrpo.features.fast_path.speed import GENERATION, TRAINING, Speed, SpeedPart
from trl_drgrpo.features.fast_path.window import Window, WindowMetrics, plan_of, planner_for, windows
from trl_drgrpo.upstream.batches import CreditedBatch, Rollouts, ScoredTokens, TokenBatch, unknown_keys
from trl_drgrpo.upstream.hooks import Feature, Metrics
from trl_drgrpo.upstream.kv_cache import without_adapters
from trl_drgrpo.upstream.private_state import swapped

if TYPE_CHECKING:
    from trl_drgrpo.upstream.trainer_protocol import TrainerProtocol


class FastPath(Feature):
    """Plans micro-batches, scores tokens in packs and generates from one run of each prompt.

    It owns these hooks, and does as TRL does with `args.micro_batching="upstream"`.

    Attributes:
        speed ([`Speed`]): Which parts are used, and why others are not.
    """

    def __init__(self, trainer: "TrainerProtocol"):
        super().__init__(trainer)
        self._packs: MicroBatch | None = None  # of the micro-batch whose loss is being computed
        self._rollouts_are_new = False
        self._old_log_probs_are_due = False
        self._window_metrics: WindowMetrics | None = None
        self._costs: dict[tuple[int, bool], Costs] = {}  # by the identity of a model, and its checkpointing
        self._rebatches: dict[int, bool] = {}  # by the identity of a model
        self.speed = Speed()

    # What may be done

    @property
    def plans(self) -> bool:
        """Tell whether micro-batches are planned: the loss must be a plain sum over tokens with a constant divisor."""
        return self._may_plan and self._rebatches_rows()

    @property
    def _may_plan(self) -> bool:
        return self.trainer.args.micro_batching == "exact" and self._why_not_planned() is None

    @property
    def skips(self) -> bool:
        """Tell whether rows without advantage are skipped: nothing but the advantage may give them a gradient."""
        return self.plans and self._why_not_skipped() is None

    def _why_not_skipped(self) -> str | None:
        # A proof on this host goes before everything else: what it has found wrong is not used.
        reason = self.speed.barred.get(SpeedPart.SKIPPED_ROWS)
        if reason:
            return reason
        if self.trainer.router_balance is not None:
            return "every token counts in the load-balancing loss"
        if self.trainer.beta:
            return "with beta > 0 the KL term gives every row a gradient"
        readers = [term.name for term in self.trainer.loss_terms if term.reads_all_rows]
        if readers:
            return f"every row has a loss under {', '.join(readers)}"
        return None

    def _why_not_planned(self) -> str | None:
        reason = self.speed.barred.get(SpeedPart.PLANNED)
        if reason:
            return reason
        trainer = self.trainer
        args = trainer.args
        if args.entropy_coef != 0 or args.use_adaptive_entropy:
            return "the entropy bonus is a mean over the tokens of a micro-batch"
        if args.top_entropy_quantile < 1:
            return "top_entropy_quantile compares the tokens of a micro-batch"
        if trainer.aux_loss_enabled and trainer.router_balance is None:
            return "the load-balancing loss is a mean over the tokens of a micro-batch (see router_aux_scope)"
        adapter = getattr(trainer.unwrapped_model, "active_peft_config", None)
        if adapter is not None and adapter.is_prompt_learning:
            return "the adapter prepends virtual tokens"
        if args.torch_compile:
            return "torch.compile would recompile for every shape"
        if rope_depends_on_width(trainer.model.config):
            return "the model's rotary angles depend on the width of a batch"
        if trainer.own_losses:  # a subclass's loss need not be a sum over tokens
            return f"{type(trainer).__name__} has its own {' and '.join(trainer.own_losses)}"
        return None

    @contextmanager
    def around_train(self) -> Iterator[None]:
        self._note_training()
        self._window_metrics = WindowMetrics(clips_rows=self.trainer.args.importance_sampling_level == "sequence")
        # cuDNN plans its attention anew for every width, in 0.1 to 0.2 s (H100, 2026-11-27), and packs have many.
        allowed = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(allowed and not self._may_plan)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(allowed)

    def _note_training(self) -> None:
        """Tell which parts of the training are used. Whether prompts are shared is known after the self-test."""
        args = self.trainer.args
        if args.micro_batching != "exact":
            self.speed.off(f"micro_batching is {args.micro_batching!r}", *TRAINING, expected=True)
            return
        reason = self._why_not_planned()
        if reason:
            self.speed.off(reason, *TRAINING)
            return
        self.speed.on(SpeedPart.PLANNED)
        self.speed.set(SpeedPart.SKIPPED_ROWS, self._why_not_skipped())
        if not args.share_prompts:
            self.speed.off("share_prompts is False", SpeedPart.SHARED_PROMPTS, expected=True)

    # Planning

    def on_credit(self, batch: CreditedBatch) -> None:
        # Not planned here: TRL shuffles the rows of the batch and splits them behind this hook.
        self._rollouts_are_new = self.trainer.model.training

    def on_micro_batch(self, inputs: Rollouts) -> Rollouts:
        """Plan the micro-batches of a new generation batch, and give the one that is due."""
        if not self._rollouts_are_new:
            return inputs
        self._rollouts_are_new = False
        # In place: TRL hands out the micro-batches of its buffer one after the other, in every iteration over them.
        buffered = self.trainer.buffered_rollouts
        if self.plans and self._can_be_planned(buffered):
            buffered[:] = self._planned(buffered)
        # Behind the plan, which says which rows run and in which packs.
        if self.trainer.router_balance is not None:
            with self.trainer.router_balance.counting(buffered):
                self._score_policy(buffered)
        elif self._old_log_probs_are_due:
            self._score_policy(buffered)
        return buffered[self.trainer.micro_step % len(buffered)]

    def _can_be_planned(self, micro_batches: list[Rollouts]) -> bool:
        reason = None
        unknown = unknown_keys(micro_batches[0])
        if unknown:
            reason = f"micro-batches with {', '.join(unknown)} are not re-batched"
        elif not all(batch["prompt_mask"].any(dim=1).all() for batch in micro_batches):
            reason = "some rows have no prompt"
        reason = self._agreed(reason)
        if reason:
            self.speed.off(reason, *TRAINING)
        return reason is None

    def _agreed(self, reason: str | None) -> str | None:
        """Return the first reason that any rank has; `None` where none has one."""
        return next(filter(None, self.trainer.gathered([reason])), None)

    def _planned(self, micro_batches: list[Rollouts]) -> Sequence[Rollouts]:
        costs = self._plan_costs(self.trainer.model)
        prompts = micro_batches[0]["prompt_ids"]
        completions = micro_batches[0]["completion_ids"]
        budget = Budget(len(completions), prompts.size(1) + completions.size(1))
        scores_all_tokens = self.trainer.router_balance is not None
        planned = []
        for slots in windows(len(micro_batches), self.trainer.args.gradient_accumulation_steps):
            rollouts = [micro_batches[slot] for slot in slots]
            window = Window(rollouts, skip=self.skips, budget=budget, costs=costs, whole=scores_all_tokens)
            planned.append(window)
        # Ranks plan by themselves, but must run the same number of forwards of the same number of rows: TRL gathers
        # metrics inside of its loss, and divides by the rows of a micro-batch.
        summaries_of_ranks = self.trainer.gathered([[window.summary() for window in planned]])
        batches = []
        for number, window in enumerate(planned):
            summaries = [summaries_of_rank[number] for summaries_of_rank in summaries_of_ranks]
            batches += window.micro_batches(summaries, self.trainer.counts_forwards)
        metrics = self.trainer.describing.value(
            "The metrics of the plan", lambda: self._plan_metrics(planned, batches), otherwise={}
        )
        self.trainer.log_batch({name: [value] for name, value in metrics.items()}, {})
        return batches

    def _plan_metrics(self, planned: list[Window], micro_batches: Sequence[Rollouts]) -> dict[str, float]:
        total: Counter[str] = Counter()
        for window in planned:
            total.update(window.statistics())
        forwards = sum(self.loss_without_forward(batch) is None for batch in micro_batches)
        # Optimizer steps of one pass over the generation batch.
        steps = len(micro_batches) / self.trainer.args.gradient_accumulation_steps
        self.speed.uses[SpeedPart.PLANNED] += forwards
        self.speed.uses[SpeedPart.SKIPPED_ROWS] += total["rows"] - total["run"]
        metrics = {
            "drgrpo/rows_skipped_frac": 1 - total["run"] / total["rows"],
            "drgrpo/micro_batches": forwards / steps,
            "drgrpo/upstream_token_frac": total["processed"] / total["upstream"],
        }
        if total["processed"]:
            metrics["drgrpo/useful_token_frac"] = total["useful"] / total["processed"]
        return metrics

    def _plan_costs(self, model: PreTrainedModel) -> Costs:
        """Return the cost model for the plans of a model. A reference may be made otherwise than the policy."""
        # Checkpointed layers see another cache, or none, so a model that hands on states is tested with and without.
        # TRL switches checkpointing off while it scores.
        key = id(model), starts_from_states(model.config) and getattr(model, "is_gradient_checkpointing", False)
        if key not in self._costs:
            shares = self.trainer.args.share_prompts and self._can_share_prompts(model)
            device = self.trainer.accelerator.device.type
            self._costs[key] = costs_of(model.config, device, shares, self._multiple)
        return self._costs[key]

    @property
    def _multiple(self) -> int:
        return int(self.trainer.args.pad_to_multiple_of or 1)

    def _can_share_prompts(self, model: PreTrainedModel) -> bool:
        unwrapped = self.trainer.accelerator.unwrap_model(model)
        reason = self.speed.barred.get(SpeedPart.SHARED_PROMPTS)
        why_not = why_not_shared
        if starts_from_states(unwrapped.config):
            from trl_drgrpo.features.fast_path.branch_agreement import why_not_branched

            why_not = partial(why_not_branched, self.trainer)
        if reason is None:
            reason = why_not(unwrapped, partial(self._log_probs, model), self._reduced_dtype(model))
        if self.trainer.in_lockstep:  # all ranks or none: they run the same forwards
            reason = self._agreed(reason)
        self.speed.set(SpeedPart.SHARED_PROMPTS, reason)
        return reason is None

    def _reduced_dtype(self, model: PreTrainedModel) -> torch.dtype | None:
        """Return the dtype that products are rounded to, where it is not that of the weights."""
        precision = self.trainer.accelerator.mixed_precision
        if precision == "fp16":
            return torch.float16
        # Quantized weights are rounded anew in every product.
        if precision == "bf16" or getattr(model, "is_quantized", False):
            return torch.bfloat16
        return None

    def _rebatches_rows(self) -> bool:
        """Tell whether rows of the policy may be re-batched. Asked first while a batch is scored, by every rank."""
        model = self.trainer.model
        if id(model) not in self._rebatches:
            reason = self._agreed(self._why_not_rebatched(model))
            self._rebatches[id(model)] = reason is None
            if reason:
                self.speed.off(reason, *TRAINING)
        return self._rebatches[id(model)]

    def _why_not_rebatched(self, model: PreTrainedModel) -> str | None:
        unwrapped = self.trainer.accelerator.unwrap_model(model)
        takes_positions = "position_ids" in inspect.signature(without_adapters(unwrapped).forward).parameters

        def padded(tokens: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
            position_inputs = {"position_ids": positions} if takes_positions else {}
            return self.trainer.score_as_trl(lambda **inputs: model(**inputs, **position_inputs), tokens)[0]

        return why_not_rebatched(unwrapped, partial(self._log_probs, model), padded, self._reduced_dtype(model))

    # Scoring

    def score_tokens(self, model: PreTrainedModel, tokens: TokenBatch) -> ScoredTokens:
        """Run rows left-aligned and cut to their own extent, in packs; give the values where TRL expects them."""
        # Asked before the router is read: the self-test behind it runs other tokens.
        plans = self.trainer.model.training and self.plans
        score = partial(self._score_tokens, plans)
        balance = self.trainer.router_balance
        if balance is not None:
            return balance.scored(model, tokens, score)
        return score(model, tokens)

    def _score_tokens(self, plans: bool, model: Any, tokens: TokenBatch) -> ScoredTokens:
        if not (plans and tokens.is_text_only):
            return self.trainer.score_as_trl(model, tokens)
        if self._may_wait(model):
            # TRL gets zeros for now. `on_micro_batch` computes the old log-probabilities when the plan is made.
            self._old_log_probs_are_due = True
            completions = tokens.input_ids[:, -tokens.completion_width :]
            return torch.zeros_like(completions, dtype=torch.float32), None, None
        if self._packs is not None:
            return self._score_packs(model, tokens, self._packs, whole=self.trainer.router_balance is not None)
        if self.trainer.scores_rollouts:
            return self._score_rollouts(model, tokens)
        return self.trainer.score_as_trl(model, tokens)  # a micro-batch that was not planned

    def _may_wait(self, model: PreTrainedModel) -> bool:
        """Tell whether old log-probabilities wait for the plan: it says which rows are trained on, and their pass may
        count the experts' loads, too."""
        args = self.trainer.args
        if args.use_vllm and args.vllm_importance_sampling_correction:
            return False  # TRL compares them with vLLM's while the batch is being made
        gains = self.skips or self.trainer.router_balance is not None
        return self.trainer.scores_rollouts and gains and model is self.trainer.model

    def _score_policy(self, micro_batches: list[Rollouts]) -> None:
        """Run the rows of a generation batch without gradient, micro-batch by micro-batch, and keep the old
        log-probabilities where they had to wait."""
        for inputs in micro_batches:
            if self.loss_without_forward(inputs) is None:
                with self.computing_loss(inputs):
                    log_probs = self.trainer.completion_log_probs(inputs)
                if self._old_log_probs_are_due:
                    inputs["old_per_token_logps"] = log_probs
        self._old_log_probs_are_due = False

    def _score_rollouts(self, model: PreTrainedModel, tokens: TokenBatch) -> ScoredTokens:
        """Score all rows of a generation batch, in as many forwards as their lengths ask for."""
        rows = rows_of(tokens)
        # The first token of a completion is predicted by the last one of its prompt.
        has_prompts = all(row.prompt_length for row in rows)
        if self.trainer.in_lockstep:  # another rank may have images, and asks nobody
            has_prompts = not self.trainer.takes_images and all(self.trainer.gathered([has_prompts]))
        if tokens.compute_entropy or not has_prompts:  # TRL asks for none here
            return self.trainer.score_as_trl(model, tokens)
        budget = Budget(tokens.batch_size or len(rows), tokens.input_ids.size(1))
        costs = self._plan_costs(model)
        plan = planner_for(costs).plan_window(rows, None, budget, costs)
        if self.trainer.in_lockstep:  # forwards of nothing, where another rank has more of them
            most = max(self.trainer.gathered([len(plan)]))
            plan += [[]] * (most - len(plan))
        log_probs = tokens.input_ids.new_zeros(len(rows), tokens.completion_width, dtype=torch.float32)
        # (B, T) of each: 0 in rows of other batches.
        for batch in plan:
            log_probs = log_probs + self._score_packs(model, tokens, batch)[0]
        return log_probs, None, None

    def _score_packs(
        self,
        model: PreTrainedModel,
        tokens: TokenBatch,
        packs: MicroBatch,
        whole: bool = False,
    ) -> ScoredTokens:
        form = mask_form(self.trainer.accelerator.unwrap_model(model).config)
        layout = tokens, packs, self.trainer.pad_token_id, self._multiple
        # A model takes a block mask, hands on its states, or gets rows alone: the self-tests have decided.
        if isinstance(form, MaskForm):
            packed = pack_rows(*layout, form, whole)
        elif any(len(pack) > 1 for pack in packs):
            from trl_drgrpo.features.fast_path.branches import branch_rows

            packed = branch_rows(*layout)
        else:  # packs have no branches, and need no mask
            packed = pack_rows(*layout, whole=whole)
        self.speed.uses[SpeedPart.SHARED_PROMPTS] += sum(len(pack) - 1 for pack in packs if pack)
        if packed.row_counts is not None and self.trainer.router_balance is not None:
            # It reads the router in this forward, and weighs each token by the rows that contain it.
            self.trainer.router_balance.row_counts = packed.row_counts
        log_probs, entropies, _ = self._score_packed(model, packed, tokens.compute_entropy)
        if entropies is not None:
            entropies = packed.unpack(entropies)
        return packed.unpack(log_probs), entropies, None

    def _log_probs(self, model: PreTrainedModel, packed: Packed) -> torch.Tensor:
        return self._score_packed(model, packed, False)[0]

    def _score_packed(
        self,
        model: PreTrainedModel,
        packed: Packed,
        compute_entropy: bool,
    ) -> ScoredTokens:
        """Score the targets, `(1, n)`, with TRL's function: the model in it runs the packs, not the ids TRL passes."""
        unwrapped = self.trainer.accelerator.unwrap_model(model)
        backbone = without_adapters(unwrapped).base_model
        packs = {"input_ids": packed.input_ids, "attention_mask": packed.attention_mask}
        if packed.position_ids is not None:
            packs["position_ids"] = packed.position_ids
        if hasattr(unwrapped.config.get_text_config(), "output_router_logits"):
            packs["output_router_logits"] = False  # a configuration may ask for a loss that expects a plain mask

        def run(
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            labels: torch.Tensor,
            **kwargs: Any,
        ) -> Any:
            prompts_first = nullcontext()
            if packed.prompts:
                prompts_first = packed.prompts.run_first(backbone)
            # In this order: the positions of prompts are among those that are chosen.
            with prompts_first, scored_only(backbone, packed):
                return model(**packs, shift_labels=packed.targets, **kwargs)

        # TRL keeps the last n columns of what the model returns. The ids have the shape that n completion tokens have;
        # `run` ignores them.
        count = packed.targets.size(1)
        ids = packed.targets.new_zeros(1, count + 1)
        tokens = TokenBatch(ids, torch.ones_like(ids), count, None, compute_entropy)
        return self.trainer.score_as_trl(run, tokens)

    # Loss

    def loss_without_forward(self, inputs: Rollouts) -> torch.Tensor | None:
        """Return a loss of 0 for a slot that the plan left empty."""
        plan = plan_of(inputs)
        if plan is None or plan["rows"]:
            return None
        return torch.zeros((), device=self.trainer.accelerator.device, requires_grad=True)

    def computing_loss(self, inputs: Rollouts) -> AbstractContextManager[None]:
        """Score the rows of a planned micro-batch in its packs."""
        plan = plan_of(inputs)
        return nullcontext() if plan is None else swapped(self, _packs=plan["packs"])

    def rows_per_nominal_row(self, inputs: Rollouts) -> float:
        """Rows of a micro-batch over those of a stock one: TRL divides by the first, the objective by the second."""
        plan = plan_of(inputs)
        return 1.0 if plan is None else plan["rows"] / plan["nominal_rows"]

    def loss_metrics(self, inputs: Rollouts, metrics: Metrics) -> Metrics:
        """Sum metrics over an optimizer step, so that they mean the same as those of stock micro-batches."""
        plan = plan_of(inputs)
        if plan is None or self._window_metrics is None:
            return metrics
        self._window_metrics.add(plan, metrics, self.trainer.accelerator.num_processes)
        return self._window_metrics.finish(plan["window"]) if "window" in plan else {}

    # Generation

    def generating(self, limits: Sequence[int] | None = None) -> AbstractContextManager[None]:
        """Run prompts once and drop finished rows inside the block, where transformers' own loop would generate.

        `limits`: tokens that each row of the call may write. Ignored by vLLM and continuous batching.
        """
        trainer = self.trainer
        args = trainer.args
        is_chosen = True  # a user who has switched it off needs no warning
        if args.use_vllm:
            reason = "vLLM generates"
        elif args.use_transformers_continuous_batching:
            reason = "continuous batching generates"
        elif args.micro_batching != "exact":
            reason = f"micro_batching is {args.micro_batching!r}"
        elif not args.fast_generation:
            reason = "fast_generation is False"
        else:
            is_chosen = False
            reason = self.speed.barred.get(SpeedPart.PROMPTS_ONCE)
            if args.torch_compile:
                reason = "torch.compile would recompile for every shape"
            if trainer.in_lockstep:
                reason = "ranks with a part of the model each run the same forwards"
        if reason:
            self.speed.off(reason, *GENERATION, expected=is_chosen)
        if args.use_vllm or args.use_transformers_continuous_batching:
            return nullcontext()
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        return shared_prefill(model, reason is None, limits, self.speed, args.generation_rows)
