r"""Implicit process rewards: how much more likely a model makes a step than its reference does.

    r_k = beta * sum over the tokens t of step k of (log pi(y_t | y_<t) - log pi_ref(y_t | y_<t))

A model trained to tell correct answers from incorrect ones by this sum over the whole answer has, without any step
label, learned a value in it: `q_k = r_1 + ... + r_k` (arXiv 2412.01981). `cumulative=True` gives `q_k`, as the cards
of EurusPRM print it; the default gives `r_k`, the process reward of PRIME (arXiv 2502.01456).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import positive, refuse_outside
from trl_drgrpo.process_rewards.loading import Model, Tokenizer, load_tokenizer, longest_input
from trl_drgrpo.process_rewards.named import register_prm_format
from trl_drgrpo.process_rewards.prm_inputs import STEP, Prompt, ScoringInput, encode_marked
from trl_drgrpo.process_rewards.prm_scorer import PRMScorer
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from trl_drgrpo.process_rewards.step_scorer import RaggedRewards


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
        batch_size (`int`, *optional*, defaults to `2`): Rows per forward pass, with logits of the whole vocabulary at
            every token of an answer.
        **options: See [`PRMScorer`]; those of loading hold for both models.

    Attributes:
        is_causal (`bool`): `False`, so it cannot be a baseline: the last token of a step depends on whether another
            follows.

    Raises:
        `InputError`: No reference and no adapter, a reference of another tokenizer, a tokenizer without chat template,
            a model that does not load, `beta` that is not positive.

    Source: arXiv 2412.01981, 2502.01456 and the code on EurusPRM's cards. Differs in the boundaries: the cards' code
    counts the first token of the next step to a step.
    """

    settings: ClassVar = {"reference": None, "beta": 0.05, "cumulative": False, "step_separator": DEFAULT_SEPARATOR}
    reference: Any  # a name before it is loaded
    beta: float
    cumulative: bool

    def __init__(
        self,
        model: Model,
        reference: "Model | None" = None,
        tokenizer: "Tokenizer | None" = None,
        *,
        batch_size: int = 2,
        **options: Any,
    ):
        super().__init__(model, tokenizer, reference=reference, batch_size=batch_size, **options)

    def load(self) -> None:
        """Load the model as [`PRMScorer`] does, and the reference."""
        super().load()
        if self.reference is not None:
            self.max_length = min(self.max_length, longest_input(self.reference, self.tokenizer))

    def _load(self, model: Model) -> "PreTrainedModel":
        refuse_outside("beta", self.beta, positive(remedy="0.05 is the default."))
        if self.reference is None and not hasattr(model, "disable_adapter"):
            remedy = "Name the model that it was trained from, or pass a PEFT model: its base is the reference."
            raise InputError(f"reference of '{self.__name__}'", "none", "a second causal language model", remedy)
        self._check_same_tokenizer()
        loaded = super()._load(model)
        if self.reference is not None:
            self.reference = super()._load(self.reference)
        return loaded

    def _check_same_tokenizer(self) -> None:
        """Refuse a reference, named by its path, that has another vocabulary; added tokens may differ."""
        if not isinstance(self.reference, str):
            return
        reference_tokenizer = load_tokenizer(self.reference, None, self._loading["trust_remote_code"])
        # Entries of one tokenizer alone: tokens, or their ids.
        own_entries = _own_vocabulary(self.tokenizer).items()
        differing = own_entries ^ _own_vocabulary(reference_tokenizer).items()
        if differing:
            got = f"a tokenizer in which {len(differing)} entries differ"
            remedy = "Name the model that it was trained from."
            raise InputError(f"reference of '{self.__name__}'", got, "the model's own tokenizer", remedy)

    def _check_format(self, row: ScoringInput) -> None:
        """Refuse, beyond the parent's checks, a model that lacks outputs for tokens in use."""
        super()._check_format(row)
        # Of the tokens that were added, only those in the row count: a model may have no output for the others.
        vocabulary_size = max(*row.input_ids, *_own_vocabulary(self.tokenizer).values()) + 1
        for role in ("model", "reference"):
            model = getattr(self, role) or self.model  # without a reference, the base under the adapter
            outputs = model.config.get_text_config().vocab_size
            if outputs < vocabulary_size:
                remedy = "Use a model and a reference of the same family, with one tokenizer."
                field = f"{role} of '{self.__name__}'"
                raise InputError(field, f"{outputs} tokens", f"at least {vocabulary_size}", remedy)

    def _encode(self, prompt: Prompt, steps: Sequence[str]) -> ScoringInput:
        # Two neighboring marks enclose a step, and the separator behind it: | a. \n\n| b.|
        # The first one is read at the last token before the answer.
        answer = STEP + f"{self.step_separator}{STEP}".join(steps) + STEP
        chat = self._chat(prompt, answer)
        return encode_marked(self.tokenizer, chat, len(steps) + 1, special_tokens=False)

    def _parts(self, encoded: ScoringInput) -> list[ScoringInput]:
        """Return the whole row, as log-probabilities are summed from one step to the next, or nothing."""
        fitted = encoded.fit(self.max_length)
        if fitted is None:
            return []
        return [fitted]

    def _scores(self, rows: Sequence[ScoringInput]) -> "RaggedRewards":
        import torch

        log_probs = self._log_probs(rows, self.model)
        if self.reference is not None:
            log_probs_ref = self._log_probs(rows, self.reference)
        else:  # the base under the adapter
            with self.model.disable_adapter():
                log_probs_ref = self._log_probs(rows, self.model)
        scores = []
        for row, row_logps, row_logps_ref in zip(rows, log_probs, log_probs_ref, strict=True):
            log_ratios = (row_logps - row_logps_ref).double()
            # Steps that are read at the tokens 9, 14 and 20 have 5 and 6 tokens.
            widths = [end - start for start, end in pairwise(row.read)]
            sums = torch.stack([step.sum() for step in log_ratios.split(widths)])
            if self.cumulative:
                sums = sums.cumsum(0)
            rewards = self.beta * sums
            scores.append(rewards.tolist())
        return scores

    def _log_probs(self, rows: Sequence[ScoringInput], model: "PreTrainedModel") -> "list[torch.Tensor]":
        """Return for each row the log-probabilities of the answer's tokens, in float32 on the CPU."""
        import torch

        model.eval()
        positions = [range(row.read[0], row.read[-1]) for row in rows]
        log_probs = []
        for row, places, logits in zip(rows, positions, self._logits(rows, positions, model), strict=True):
            # The logits at a token predict the next one.
            answer = [row.input_ids[place + 1] for place in places]
            tokens = torch.tensor(answer, device=logits.device).unsqueeze(1)
            all_log_probs = logits.float().log_softmax(dim=-1)  # (T, V)
            log_probs.append(all_log_probs.gather(1, tokens)[:, 0].cpu())
        return log_probs


def _own_vocabulary(tokenizer: "PreTrainedTokenizerFast") -> dict[str, int]:
    """Return the vocabulary without the tokens that were added to it."""
    added = tokenizer.get_added_vocab()
    return {token: i for token, i in tokenizer.get_vocab().items() if token not in added}


register_prm_format(
    "implicit_prm",
    ImplicitRewardScorer,
    help="The step's log-ratio of two models (EurusPRM).",
    is_causal=False,  # the separator counts to the step before it, and is there only if a step follows
    published_ids="eurusprm",
)
