"""`GRPOTrainer` with public hooks.

TRL's GRPO files change weekly, so the rest of the package never touches a private name: `HostTrainer` overrides the
few private methods that matter, calls `super()` exactly once in each, and hands what comes back to a public hook
(`hooks.py`). What each override relies on stands in `seams.py`, which compares it with the TRL that is installed.

Importing this module imports TRL's trainer (6-10 s). A TRL outside the supported range is refused by the configuration
(`config/config.py`), which every trainer needs first.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, Trainer
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trl_drgrpo.common.disk import working_directory_kept
from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.common.secrets import without_secrets
from trl_drgrpo.upstream.batches import (
    DatasetRow,
    Rollouts,
    ScoredBatch,
    ScoredTokens,
    TokenBatch,
    joined_rows,
    token_batch,
    whole_row,
)
from trl_drgrpo.upstream.checkpoint_weights import load_default_adapter, load_translated, without_tied
from trl_drgrpo.upstream.description import CARD
from trl_drgrpo.upstream.hooks import CardArguments, Completions, Hooks, Metrics, owned
from trl_drgrpo.upstream.private_state import PrivateState, swapped
from trl_drgrpo.upstream.seams import patched_by
from trl_drgrpo.upstream.starting_weights import add_reference_adapter, starting_weights
from trl_drgrpo.upstream.versions import brief_bars

if TYPE_CHECKING:
    from trl_drgrpo.upstream.argument_types import ScoringModel
    from trl_drgrpo.upstream.environments import ToolLoop
    from trl_drgrpo.upstream.vllm_adapters import VLLMSync

_TABLE = "The table of completions"  # a place, as the guard names it


class HostTrainer(Hooks, PrivateState):
    """`GRPOTrainer` with public hooks where this package steps in. With the hooks as they are, it is `GRPOTrainer`.

    Each override calls `super()` once and edits what comes back; none copies a parent's body. The comment at the top
    of an override says what TRL or transformers does in the method, and what is different here.
    """

    _put_off: dict[str, int | None] | None = None  # while a checkpoint is being written: save_total_limit, and uploads
    _loads_from: str | None = None  # the checkpoint whose weights are being loaded
    _uploads_reported: Sequence[Future[Any]] = ()  # those whose end was looked at
    _tool_loop: "ToolLoop | None" = None  # while tools are called
    _scored: list[ScoredTokens] | None = None  # what was scored for a loss that has additional terms
    vllm_lora: str  # set where the run has vLLM
    _begins_rows = False  # whether the next generation is the first of its batch, before any turn with tools
    scores_rollouts = False  # while a generation batch is being made: TRL scores it for old and reference log-probs

    def __init__(self, model, reward_funcs=None, args=None, *others, **kwargs):
        # TRL's constructor loads the policy, its reference and the reward models, makes a tool of each method of an
        # environment, and starts vLLM. It looks functions and classes up in its module: ours stand there meanwhile.

        def vllm_sync(*arguments: Any, **options: Any) -> "VLLMSync":
            from trl_drgrpo.upstream.vllm_adapters import VLLMSync  # for runs with vLLM alone

            return VLLMSync(*arguments, trainer=self, **options)

        engine = swapped(sys.modules[GRPOTrainer.__module__], VLLMGeneration=vllm_sync)
        with starting_weights(self, model, args) as start, brief_bars(), engine:
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        self.beta = self.args.beta  # 0 for TRL's constructor where there is an adapter
        self.built_with = {}
        for name, value in vars(self.args).items():
            # Lists and mappings as copies: they may be changed in place.
            self.built_with[name] = copy.copy(value) if isinstance(value, dict | list) else value
        self.sample_as_configured()
        self.on_built(start.values)
        # Behind the hook, which may restore the dtype of the adapter: the reference is a copy of it.
        if self.beta:
            add_reference_adapter(self.model, is_new=start.has_new_adapter)

    @owned
    def score_tokens(self, model: PreTrainedModel, tokens: TokenBatch) -> ScoredTokens:
        """Log-probabilities and entropies of completion tokens."""
        return self.score_as_trl(model, tokens)

    # The seams themselves.

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # TRL calls the reward functions on this rank's rows and gathers what they return. Nothing of it is changed.
        with self.scoring():
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs) -> dict[str, Any]:
        # TRL makes a generation batch of rows: completions, rewards, advantages. Here a feature may collect it from
        # several rounds, so the call of `super()` stands in the function that makes one round.
        with self.making_batch(), working_directory_kept("A reward function, a tool or an environment"):
            return {**self.collecting(inputs, self._scored_rollouts)}

    def _scored_rollouts(self, inputs: list[DatasetRow]) -> Rollouts:
        """Completions, rewards and advantages of rows."""
        self.on_rows(inputs)
        calculate = self._calculate_rewards  # a subclass's, where it has one: what it returns is what TRL gets
        scored: list[ScoredBatch] = []

        # TRL returns advantages, but neither the completions' texts nor their rewards: they are seen on the way.
        def calculate_and_show(inputs, prompts, completions, completion_ids_list):
            rewards_per_func = calculate(inputs, prompts, completions, completion_ids_list)
            batch = ScoredBatch(rewards_per_func, inputs, prompts, completions, completion_ids_list, self.environments)
            self.on_rewards(batch)
            scored.append(batch)
            return rewards_per_func

        with swapped(self, scores_rollouts=True, _calculate_rewards=calculate_and_show):
            rollouts = Rollouts(**super()._generate_and_score_completions(inputs))
        return self.on_rollouts(scored[-1], rollouts)

    def _generate(self, prompts):
        # TRL makes the completions of a batch: the first turn, those with tools, or all of a `rollout_func`. It has
        # just made the tables of tools, so methods that are none are taken out here, before a prompt describes them.
        with self.rolling_out():
            self._withhold_turn_methods()
            self.on_turns_begin(range(len(prompts)))
            with swapped(self, _begins_rows=True):
                return super()._generate(prompts)

    def _withhold_turn_methods(self) -> None:
        if self.environment_factories is not None:
            from trl_drgrpo.upstream.environments import withhold_turn_methods

            withhold_turn_methods(self)

    def _environment_of(self, row: DatasetRow) -> str | None:
        """Name of the environment that a row asks for, where the run has several."""
        is_one_of_several = self.environment_factories is not None and self._multi_environment
        return row.get("environment") if is_one_of_several else None

    def prompt_lengths(self, rows: Sequence[DatasetRow]) -> list[int]:
        """Tokens of the prompts of a dataset's rows as the model gets them: through the chat template, with tools."""
        self._withhold_turn_methods()
        # TRL notes the environments of a batch before it renders the prompts with the tools of each.
        with swapped(self, _batch_environments=[self._environment_of(row) for row in rows]):
            prompt_ids = self._tokenize_prompts([row["prompt"] for row in rows])[0]
        return list(map(len, prompt_ids))

    def template_arguments(self, row: DatasetRow) -> dict[str, Any]:
        """Arguments of the chat template beside the messages of a dataset's row."""
        arguments: dict[str, Any] = {**(self.args.chat_template_kwargs or {})}
        tools = self.tools
        if self.environment_factories is not None:
            self._withhold_turn_methods()
            tools = self._env_tools[self._environment_of(row)]
        if tools:
            arguments["tools"] = list(tools)
        if self.chat_template is not None:  # TRL's own, for some models with tools
            arguments["chat_template"] = self.chat_template
        return arguments

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, *args, **kwargs):
        # TRL runs the tools that completions call, and generates for those rows again, until no row calls any. It
        # adds the messages to `completions` in place, from which `ToolLoop` tells which rows begin another turn.
        from trl_drgrpo.upstream.environments import ToolLoop

        with swapped(self, _tool_loop=ToolLoop(completions)):
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *args, **kwargs)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs):
        # TRL samples one completion per prompt: the first of a batch, then one in each turn with tools. Here the end
        # of a completion is as configured, and a feature may make the first ones (`completing`), such as forks.
        if self._tool_loop is not None:
            self.on_turns_begin(self._tool_loop.rows_that_go_on())

        def generate(
            prompt_ids: list[list[int]], num_generations: int, limits: Sequence[int] | None = None
        ) -> Completions:
            longest = max(limits) if limits else None
            with self.sampling_as_configured(), self.generating(limits), self.completions_up_to(longest):
                # `super()` without arguments would take this function's first one for the trainer.
                completions = super(HostTrainer, self)._generate_single_turn(
                    prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs
                )
            return self.cut_at_stop_strings(prompt_ids, completions)

        is_text_only = images is None and not multimodal_fields
        if not (self._begins_rows and is_text_only):
            return generate(prompt_ids, num_generations)
        with swapped(self, _begins_rows=False):
            return self.completing(prompt_ids, num_generations, generate)

    def _prepare_inputs(self, generation_batch):
        # TRL returns the micro-batch that is due, and makes a generation batch first where none is left. In training
        # the fast path puts its own in the place of TRL's; in evaluation a batch is never divided.
        inputs = super()._prepare_inputs(generation_batch)
        return self.on_micro_batch(inputs) if self.model.training else inputs

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **options
    ):
        # TRL scores tokens for old and reference log-probabilities, and in the loss. Here the fast path may do it in
        # another way, and the loss's values are kept for additional terms. `super()` is called by `score_as_trl`.
        tokens = TokenBatch(input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, options)
        scored = self.score_tokens(model, tokens)
        if self._scored is not None:
            self._scored.append(scored)
        return scored

    def score_as_trl(self, model: "ScoringModel", tokens: TokenBatch) -> ScoredTokens:
        """TRL's own way to compute log-probabilities and entropies of completion tokens."""
        return super()._get_per_token_logps_and_entropies(
            model,
            tokens.input_ids,
            tokens.attention_mask,
            tokens.completion_width,
            batch_size=tokens.batch_size,
            compute_entropy=tokens.compute_entropy,
            **tokens.options,
        )

    @property
    def own_losses(self) -> list[str]:
        """Methods of TRL's loss that a subclass, an assignment or a patch of TRL has replaced; an assigned method that
        is marked `watches_only` does not count."""
        names = []
        for name in ("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"):
            is_assigned = name in vars(self) and not getattr(vars(self)[name], "watches_only", False)
            is_overridden = getattr(type(self), name) is not getattr(HostTrainer, name)
            if is_assigned or is_overridden or patched_by(name):
                names.append(name)
        return names

    def completion_log_probs(self, inputs: Rollouts) -> torch.Tensor:
        """Log-probabilities of a micro-batch's completion tokens under the policy `(B, T)`, without gradient."""
        # As TRL where it scores: reentrant checkpointing warns of inputs without gradient.
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), checkpointing:
            return self.score_tokens(self.model, token_batch(inputs))[0]

    def completion_entropies(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[list[float]]:
        """Entropy of the policy at each completion token, in nats, without gradient: as many as there are tokens."""
        rows = [whole_row(*ids) for ids in zip(prompt_ids, completion_ids, strict=True)]
        inputs = joined_rows(rows, self.pad_token_id, self.accelerator.device)
        tokens = token_batch(inputs, self.args.per_device_train_batch_size, compute_entropy=True)
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), checkpointing:
            entropies = self.score_as_trl(self.model, tokens)[1]
        if entropies is None:
            raise UpstreamError("TRL computed no entropies, which forks at uncertain steps rely on.")
        entropies_of_rows = []
        for row, ids in zip(entropies, completion_ids, strict=True):
            entropies_of_rows.append(row[: len(ids)].tolist())  # without padding
        return entropies_of_rows

    def _compute_loss(self, model, inputs):
        # TRL divides the sum of the token losses by rows times `max_completion_length`, and logs as it goes. Here
        # that attribute has the value of `loss_constants` meanwhile, and logs go into a list of this micro-batch.
        loss = self.loss_without_forward(inputs)
        if loss is not None:
            return loss
        mode = "train" if self.model.training else "eval"
        logged: Metrics = defaultdict(list)
        terms = self.loss_terms
        inputs_of_trl = dict(inputs)
        if any(term.replaces_policy_loss for term in terms):
            # Without advantages the clipped loss and its gradient are 0, while KL and the rest stay.
            inputs_of_trl["advantages"] = torch.zeros_like(inputs["advantages"])
        replaced = {**self.loss_constants(inputs), "_metrics": {**self._metrics, mode: logged}}
        if terms:
            replaced["_scored"] = []
        with self.computing_loss(inputs), swapped(self, **replaced):
            loss = super()._compute_loss(model, inputs_of_trl)
            if terms:
                from trl_drgrpo.upstream.passed_terms import loss_of_terms

                [scored] = self._scored or []  # TRL's loss scores the policy once
                loss = loss + loss_of_terms(self, inputs, terms, scored, logged)
        with self.describing("The metrics of the loss"):
            for name, values in self.loss_metrics(inputs, logged).items():
                self._metrics[mode][name].extend(values)
        return loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """End a finished run that is resumed: transformers would train one more step."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def _get_grad_norm(self, model, grad_norm=None):
        # transformers calls it between clipping and the optimizer's step, with the norm from before clipping.
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if grad_norm is not None:
            self.on_grad_norm(float(grad_norm))
        return grad_norm

    def _get_train_sampler(self, dataset=None):
        # TRL makes the sampler of prompts and hands it to the dataloader alone; `advance_train_sampler` needs it.
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    def _save_checkpoint(self, model, trial):
        # transformers writes a checkpoint, begins its upload, and deletes older ones. Here upload and deletion wait
        # until it is complete with what the hook adds: a run that is killed in between must find one of them, and
        # what is uploaded must resume.
        folder = self.checkpoint_folder(trial)
        limit = self.args.save_total_limit
        put_off = swapped(self, _put_off={"save_total_limit": limit})
        with self.writing(folder):
            self.on_checkpoint_begun(folder)
            with put_off, swapped(self.args, save_total_limit=None):
                super()._save_checkpoint(model, trial)
            self.completing_checkpoint(folder)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        self.on_checkpoint_saved(folder, limit)

    def _save(self, output_dir=None, state_dict=None):
        # transformers writes the weights, and the arguments beside them: without secrets, and with the limit of
        # checkpoints that is put off while one is written.
        with without_secrets(), brief_bars(), swapped(self.args, **(self._put_off or {})):
            super()._save(output_dir, state_dict)

    def _push_from_checkpoint(self, checkpoint_folder):
        # transformers begins an upload, in the middle of `_save_checkpoint`, which here asks for it again at the end.
        if self._put_off is not None:
            return
        self._report_failed_uploads()
        with without_secrets():  # it pickles the arguments anew
            super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self):
        # transformers waits for the upload that runs, and does not look at how it ended.
        super()._finish_current_push()
        self._report_failed_uploads()

    def _report_failed_uploads(self) -> None:
        """Tell of uploads that have failed, each once."""
        uploads = getattr(self, "push_in_progress", None)
        ended = [job for job in uploads.jobs if job.done()] if uploads else []
        errors = []
        for job in ended:
            error = job.exception()
            if error is not None and job not in self._uploads_reported:
                errors.append(error)
        self._uploads_reported = ended
        if errors:
            self.on_failed_uploads(errors)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        # transformers loads the weights of a checkpoint under the model's own names, and only adapters in folders
        # where there are any. Here come the rest: see `checkpoint_weights.py`.
        with swapped(self, _loads_from=resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self.in_lockstep:
            load_default_adapter(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self):
        with swapped(self, _loads_from=self.state.best_model_checkpoint):
            super()._load_best_model()

    def _issue_warnings_after_load(self, load_result):
        # transformers warns of keys that it did not find, or did not know, after either way to load. Keys that it
        # did not know may be names from before a conversion: then the weights are loaded once more, by those names.
        if load_result.unexpected_keys and self._loads_from:
            with brief_bars():
                load_result = load_translated(self.model, Path(self._loads_from)) or load_result
        super()._issue_warnings_after_load(without_tied(self.model, load_result))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.on_checkpoint_loaded(Path(checkpoint))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # TRL adds the means of its metrics, has transformers log, and sends the table of completions. Here features
        # add numbers, and a table that cannot be made or sent ends no run.
        with self.describing("The numbers of a step"):
            self.add_to_log(logs)
        tables: AbstractContextManager[None] = nullcontext()
        if self.log_completions and self.accelerator.is_main_process:
            from trl_drgrpo.upstream.completion_tables import make_plain, mixed_tables

            tables = mixed_tables(sys.modules[GRPOTrainer.__module__])
            with self.describing(_TABLE):
                make_plain(self._logs)
        try:
            with tables:
                super().log(logs, start_time)
        except Exception as error:
            # transformers' `log` calls the callbacks, and TRL's table comes behind it.
            if any(frame.f_code is Trainer.log.__code__ for frame, _ in walk_tb(error.__traceback__)):
                raise  # from a callback, which may mean it
            self.describing.failed(_TABLE, error)
            # As TRL at the end of a log: the next one must not hold these numbers again.
            self._metrics["train" if self.model.training else "eval"].clear()

    # The model's way out.

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Write a card that states the objective, data, rewards and results, as
        [`trl.GRPOTrainer.create_model_card`]. An argument that is left out is that of an earlier call."""
        arguments: CardArguments = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
        with self.describing(CARD), self.writing_card(arguments) as completed:
            super().create_model_card(**completed)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, with the run's card beside an adapter, in the place of PEFT's. A `DiskFullError`
        says what is saved."""
        folder = Path(output_dir or self.args.output_dir)
        with self.writing(folder):
            super().save_model(output_dir, _internal_call)
            self.on_model_saved(folder)

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Open the repository; a Hub that cannot be reached, or refuses, is one clear error before anything was
        trained."""
        with self.opening_repository():
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push as transformers does; whatever goes wrong, the model is saved locally. A `PushError` says where, and
        how to push it later."""
        with self.pushing():
            return super().push_to_hub(*args, **kwargs)
