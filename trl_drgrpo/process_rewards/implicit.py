r"""Implicit process rewards: how much more likely a model makes a step than its reference does.

    r_k = beta * sum over the tokens t of step k of (log pi(y_t | y_<t) - log pi_ref(y_t | y_<t))

A model trained to tell correct answers from incorrect ones by this sum over the whole answer has, without any step
label, learned a value in it: `q_k = r_1 + ... + r_k` (arXiv 2412.01981). `cumulative=True` gives `q_k`, as the cards
of EurusPRM print it; the default gives `r_k`, the process reward of PRIME (arXiv 2502.01456).

Two sources. [`ImplicitRewardScorer`]: two models. [`PolicyLogRatio`]: the policy in training and the model that the
run began with, on the very tokens that are trained on. Paid as a reward, that one pays the policy for being far from
its reference, the opposite of a KL penalty, and amplifies what it does already; as a baseline (`cumulative=True`) it
is harmless.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, ClassVar

import torch

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import positive, refuse_outside
from trl_drgrpo.process_rewards.formats import PRMScorer
from trl_drgrpo.process_rewards.loading import load_tokenizer, longest_input
from trl_drgrpo.process_rewards.texts import STEP, ScoringInput, encode_marked

_BETA = positive(remedy="0.05 is the default.")


class ImplicitRewardScorer(PRMScorer):
    r"""Step rewards from the log-ratio of two causal language models of one vocabulary.

    The row is a chat: the prompt's messages and the steps as the assistant's answer, joined by `step_separator`. A
    separator belongs to the step before it. What the chat template writes behind the answer is not counted.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`PRIME-RL/EurusPRM-Stage2`) or model.
        reference (`str` or `PreTrainedModel`, *optional*): What `model` was trained from
            (`Qwen/Qwen2.5-Math-7B-Instruct`). Without it, `model` must be a PEFT model: its adapter is the model,
            what is under it the reference.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*): Of both, with a chat template; required if the
            model is loaded already.
        beta (`float`, *optional*, defaults to `0.05`): Factor, that of arXiv 2412.01981; EurusPRM's cards print with
            0.001.
        cumulative (`bool`, *optional*, defaults to `False`): `q_k` in the place of `r_k`.
        step_separator (`str`, *optional*, defaults to an empty line): Between two steps.
        name (`str`, *optional*, defaults to `"implicit_prm"`): Name in logs and metrics.
        batch_size (`int`, *optional*, defaults to `2`): Rows per forward pass, with logits of the whole vocabulary at
            every token of an answer.
        max_length, prompt_text, dtype, device, quantization_config, trust_remote_code: As in
            [`TokenClassificationScorer`], for both models.

    Attributes:
        is_causal (`bool`): `False`, so it cannot be a baseline: the last token of a step depends on whether another
            follows.

    Raises:
        `InputError`: No reference and no adapter, a reference of another tokenizer, a tokenizer without chat template,
            a model that does not load, `beta` that is not positive.

    Source: arXiv 2412.01981, 2502.01456 and the code on EurusPRM's cards. Differs in the boundaries: the cards' code
    counts the first token of the next step to a step.
    """

    is_causal = False  # the separator counts to the step before it, and is there only if a step follows
    settings: ClassVar = {"reference": None, "beta": 0.05, "cumulative": False, "step_separator": "\n\n"}
    reference: Any
    beta: float
    cumulative: bool

    def __init__(
        self, model: Any, reference: Any = None, tokenizer: Any = None, *, batch_size: int = 2, **options: Any
    ):
        super().__init__(model, tokenizer, reference=reference, batch_size=batch_size, **options)
        if self.reference is not None:
            self.max_length = min(self.max_length, longest_input(self.reference, self.tokenizer))

    def _load(self, model: Any) -> Any:
        refuse_outside("beta", self.beta, _BETA)
        if self.reference is None and not hasattr(model, "disable_adapter"):
            remedy = "Name the model that it was trained from, or pass a PEFT model: its base is the reference."
            raise InputError(f"reference of '{self.__name__}'", "none", "a second causal language model", remedy)
        self._check_same_tokenizer()
        loaded = super()._load(model)
        if self.reference is not None:
            self.reference = super()._load(self.reference)
        return loaded

    def _check_same_tokenizer(self) -> None:
        """A reference that is named by its path must have the model's vocabulary; added tokens may differ."""
        if not isinstance(self.reference, str):
            return
        theirs = load_tokenizer(self.reference, None, self._loading["trust_remote_code"])
        if differing := len(_own_vocabulary(self.tokenizer).items() ^ _own_vocabulary(theirs).items()):
            got = f"a tokenizer in which {differing} entries differ"
            remedy = "Name the model that it was trained from."
            raise InputError(f"reference of '{self.__name__}'", got, "the model's own tokenizer", remedy)

    def _check_format(self, row: ScoringInput) -> None:
        """Both models must have an output for every token that is in use, too; tokens that were added may not be."""
        super()._check_format(row)
        due = max(*row.input_ids, *_own_vocabulary(self.tokenizer).values()) + 1
        for role, model in (("model", self.model), ("reference", self.reference or self.model)):
            outputs = model.config.get_text_config().vocab_size
            if outputs < due:
                remedy = "Use a model and a reference of the same family, with one tokenizer."
                raise InputError(f"{role} of '{self.__name__}'", f"{outputs} tokens", f"at least {due}", remedy)

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        answer = STEP + f"{self.step_separator}{STEP}".join(steps) + STEP
        return encode_marked(self.tokenizer, self._chat(prompt, answer), len(steps) + 1, special_tokens=False)

    def _scores(self, rows: Sequence[ScoringInput]) -> list[list[float | None]]:
        mine = self._log_probs(rows, self.model)
        with self.model.disable_adapter() if self.reference is None else nullcontext():
            reference = self._log_probs(rows, self.model if self.reference is None else self.reference)
        scores: list[list[float | None]] = []
        for row, log_probs, log_probs_ref in zip(rows, mine, reference, strict=True):
            boundaries = _boundaries(row)
            widths = [end - start for start, end in pairwise(boundaries)]
            scores.append(_per_step(log_probs - log_probs_ref, widths, self.beta, self.cumulative))
        return scores

    def _log_probs(self, rows: Sequence[ScoringInput], model: Any) -> list[torch.Tensor]:
        """For each row the log-probabilities of the answer's tokens, in float32 on the CPU."""
        model.eval()
        spans = [(boundaries[0], boundaries[-1]) for boundaries in map(_boundaries, rows)]
        wanted = [list(range(start, end)) for start, end in spans]
        answers = [row.input_ids[start + 1 : end + 1] for row, (start, end) in zip(rows, spans, strict=True)]
        log_probs: list[torch.Tensor] = []
        for logits, answer in zip(self._logits(rows, wanted, model), answers, strict=True):
            tokens = torch.tensor(answer, device=logits.device).unsqueeze(1)
            log_probs.append(logits.float().log_softmax(dim=-1).gather(1, tokens)[:, 0].cpu())
        return log_probs


class PolicyLogRatio:
    """Step rewards from the policy in training and the model that the run began with; no second model to name.

    The reference is TRL's, where it holds one (`beta` above 0 without an adapter, `sync_ref_model` included); with an
    adapter, the policy without it (or with the adapter that the run began with, where TRL keeps it); else a frozen
    copy, made when the trainer is built. Tokens, template and temperature are the trainer's own; dropout is off. Tool
    results are not counted. Text only.

    Args:
        beta (`float`, *optional*, defaults to `0.05`): Factor.
        cumulative (`bool`, *optional*, defaults to `False`): The sum up to a step in the place of the step's own.
        name (`str`, *optional*, defaults to `"policy_log_ratio"`): Name in logs and metrics.

    Attributes:
        is_causal (`bool`): `True`: the score of a step reads no further than the end of that step.

    Raises:
        `InputError`: `beta` that is not positive; a sharded model of which no reference is held; images; a call
            without a trainer.
    """

    is_learned = True  # so the trainer says what it means to pay for its scores
    is_causal = True  # of the tokens that were written, by causal models

    def __init__(self, beta: float = 0.05, *, cumulative: bool = False, name: str = "policy_log_ratio"):
        refuse_outside("beta", beta, _BETA)
        self.beta, self.cumulative = beta, cumulative
        self.__name__ = name
        self._trainer: Any = None
        self._copy: Any = None
        self._rollouts: dict[str, Any] | None = None

    def on_trainer_built(self, trainer: Any) -> None:
        """Called by the trainer: the policy still has the weights that the run begins with, a resumed one's too."""
        self._trainer = trainer
        if trainer.ref_model is not None or trainer.has_adapter:
            return
        if trainer.in_lockstep:
            remedy = "Set `beta` above 0, so that TRL loads a reference model, or train an adapter."
            raise InputError(f"reference of '{self.__name__}'", "a sharded policy", "a model to compare with", remedy)
        self._copy = copy.deepcopy(trainer.model).eval().requires_grad_(False)

    def on_rollouts(self, rollouts: dict[str, Any]) -> None:
        """Called by the trainer with this rank's batch, before its steps are scored."""
        self._rollouts = rollouts

    def __call__(
        self, steps: Sequence[Sequence[str]], step_ends: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[list[float | None]]:
        """Score every step of the batch that the trainer has shown.

        Args:
            steps (`B` sequences of `K_i` texts): Not read.
            step_ends (`B` sequences of `K_i` ints): Inclusive token ends.
            **kwargs: Other arguments of the trainer.

        Returns:
            `list[list[float | None]]`: `K_i` numbers per row; 0 for masked tokens.

        Raises:
            `InputError`: Without a trainer, or with images.
        """
        rollouts, self._rollouts = self._rollouts, None
        if self._trainer is None or rollouts is None:
            remedy = "Pass it to DrGRPOTrainer as a step reward function itself, not inside another one."
            raise InputError(f"trainer of '{self.__name__}'", "none", "the trainer whose policy is compared", remedy)
        if "pixel_values" in rollouts:
            raise InputError(f"batch of '{self.__name__}'", "images", "text", "Use a process reward model.")
        model = self._trainer.model
        was_training = model.training
        model.eval()
        try:
            mine = self._in_micro_batches(rollouts, model)
            with self._trainer.without_adapter() if self._trainer.has_adapter else nullcontext():
                reference = self._in_micro_batches(rollouts, self._reference_model())
        finally:
            model.train(was_training)
        mask = rollouts["completion_mask"]
        ratio = ((mine - reference) * mask * rollouts.get("tool_mask", 1)).cpu()  # (b, T)
        rewards: list[list[float | None]] = []
        for row, ends in enumerate(step_ends):
            widths = [end - before for before, end in pairwise([-1, *ends])]
            rewards.append(_per_step(ratio[row, : sum(widths)], widths, self.beta, self.cumulative))
        return rewards

    def _reference_model(self) -> Any:
        held = self._trainer.ref_model if self._copy is None else self._copy
        return self._trainer.model if held is None else held

    def _in_micro_batches(self, rollouts: dict[str, Any], model: Any) -> torch.Tensor:
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        rows = rollouts["completion_ids"].size(0)
        size = max(1, self._trainer.args.per_device_train_batch_size)
        parts = [{key: rollouts[key][start : start + size] for key in keys} for start in range(0, rows, size)]
        return torch.cat([self._trainer.completion_log_probs(part, model) for part in parts]).float()  # (b, T)


def _per_step(ratio: torch.Tensor, widths: Sequence[int], beta: float, cumulative: bool) -> list[float | None]:
    """`beta` times the sum over each step's tokens, or over all up to its end."""
    sums = torch.stack([part.sum() for part in ratio.double().split(list(widths))]) if widths else torch.zeros(0)
    return (beta * (sums.cumsum(0) if cumulative else sums)).tolist()


def _boundaries(row: ScoringInput) -> list[int]:
    """The last token before the answer, then the last token of each step."""
    return [position for position in row.positions if position is not None]


def _own_vocabulary(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.get_added_vocab()
    return {token: i for token, i in tokenizer.get_vocab().items() if token not in added}
