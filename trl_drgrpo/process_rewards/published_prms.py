"""Published formats of process reward models (PRM): how a row is written, and which number is read.

| format | input | read |
|---|---|---|
| Math-Shepherd (arXiv 2312.08935) | `question Step 1: ... ки\nStep 2: ... ки` | `+` against `-` at each `ки` |
| VersaPRM (arXiv 2502.06737) | `question \n\n`, each step and ` \n\n\n\n` | `+` against `-` at it |
| Math-PSA (arXiv 2410.09671) | `question `, `Step 1: ...`, ` \n\n\n\n\n`, a space, ... | ` +` against ` -` at it |
| chat turns (RLHFlow, arXiv 2405.07863) | each step a user turn, answered `+` | `+` against `-` as the answer |
| Qwen2.5-Math-PRM (arXiv 2501.07301) | chat, the answer's steps each followed by `<extra_0>` | class 1 of 2 there |
| `train-prm`'s | `[bos] prompt step separator step separator ...` | class 1 of 2 at its last token |
| Skywork-o1-Open-PRM | `problem\n`, each line of the answer and the step token `\n` | sigmoid at a step's last `\n` |

The space before the line breaks of a marker belongs to it: it keeps the tokenizers of Llama 3 and Qwen2.5 from joining
the first break with a full stop. No published weights of VersaPRM, Math-PSA and Skywork were run here: the formats are
checked against their authors' code. `implicit.py` has one more format.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from trl_drgrpo.process_rewards.loading import Model, is_causal
from trl_drgrpo.process_rewards.named import register_prm_format
from trl_drgrpo.process_rewards.prm_inputs import (
    PROMPT_END,
    PROMPT_START,
    STEP,
    Prompt,
    ScoringInput,
    encode_marked,
    encode_piecewise,
)
from trl_drgrpo.process_rewards.prm_scorer import PRMScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRL_SEPARATOR = "\n"  # of a model that does not say: that of TRL's former PRM trainer


class MathShepherdScorer(PRMScorer):
    """Math-Shepherd: a causal model that predicts `+` or `-` at a marker behind every step.

    Score = softmax over the logits of the two candidate tokens at the marker, the share of `good`. A published model
    is `peiyi9979/math-shepherd-mistral-7b-prm`.

    Args:
        marker (`str`, *optional*, defaults to `"ки"`): One token of the vocabulary.
        good (`str` or `int`, *optional*, defaults to `"+"`): The candidate, one token; or its id.
        bad (`str` or `int`, *optional*, defaults to `"-"`): The other candidate.
        number_steps (`bool`, *optional*, defaults to `True`): Write `Step k: ` before steps that do not begin so, as
            every step of the training data does.
        **options: See [`PRMScorer`].

    Raises:
        `InputError`: Marker or candidate that is not one token, a vocabulary that does not hold them, and the errors
            of [`PRMScorer`].

    Source: arXiv 2312.08935, and the code on its model card.
    """

    settings: ClassVar = {"marker": "ки", "good": "+", "bad": "-", "number_steps": True}
    layout = (" ", " ", "\n")


register_prm_format(
    "math_shepherd_prm",
    MathShepherdScorer,
    help="`+` against `-` at the marker behind the step (Math-Shepherd).",
    is_causal=True,
    published_ids="math-shepherd",
)


class VersaScorer(PRMScorer):
    r"""VersaPRM and Llama-PRM800K: Llama 3 that predicts `+` or `-` at ` \n\n\n\n`; steps are not numbered.

    A published model is `UW-Madison-Lee-Lab/VersaPRM`.

    Args:
        marker, good, bad, number_steps: See [`MathShepherdScorer`]; other defaults.
        **options: See [`PRMScorer`].

    Raises:
        `InputError`: The errors of [`MathShepherdScorer`].
    """

    settings: ClassVar = {"marker": " \n\n\n\n", "good": "+", "bad": "-", "number_steps": False}
    layout = (" \n\n", "", "")

    def _encode(self, prompt: Prompt, steps: Sequence[str]) -> ScoringInput:
        # White space at an end of a step would join the marker's line breaks, and the marker would be another token.
        return super()._encode(prompt, [step.strip() for step in steps])


register_prm_format(
    "versa_prm",
    VersaScorer,
    help="`+` against `-` at line breaks behind the step (VersaPRM, Llama-PRM800K).",
    is_causal=True,
    published_ids="versaprm|llama-prm800k",
)


class MathPSAScorer(VersaScorer):
    r"""OpenR's Math-PSA: Qwen2.5-Math-7B-Instruct that predicts ` +` or ` -` at ` \n\n\n\n\n` behind numbered steps.

    The published checkpoint is an adapter, which loads on the base that it names; name the base's tokenizer too.

    Args:
        marker, good, bad, number_steps: See [`MathShepherdScorer`]; other defaults.
        **options: See [`PRMScorer`].

    Raises:
        `InputError`: The errors of [`MathShepherdScorer`].
    """

    settings: ClassVar = {"marker": " \n\n\n\n\n", "good": " +", "bad": " -", "number_steps": True}
    layout = (" ", "", " ")


register_prm_format(
    "math_psa_prm",
    MathPSAScorer,
    help="` +` against ` -` at line breaks behind the numbered step (OpenR's Math-PSA).",
    is_causal=True,
    published_ids="math-psa",
)


class ChatTurnScorer(PRMScorer):
    """Chat-turn models: every step is a user turn, the assistant answers `+` or `-`.

    Score of step k = softmax over the logits of the two answers where the k-th answer is predicted, the share of
    `good`, all earlier answers being `good`, as the published evaluation does. The prompt opens the first turn. A
    published model is `RLHFlow/Llama3.1-8B-PRM-Deepseek-Data`.

    Args:
        good (`str`, *optional*, defaults to `"+"`): The answer to a good step, one token.
        bad (`str` or `int`, *optional*, defaults to `"-"`): The other answer, one token or its id.
        **options: See [`PRMScorer`].

    Raises:
        `InputError`: Answers that are not one token, a vocabulary that does not hold them, a tokenizer without chat
            template, and the errors of [`PRMScorer`].

    Source: RLHFlow's process reward models (arXiv 2405.07863 and their evaluation code).
    """

    settings: ClassVar = {"good": "+", "bad": "-"}

    def _encode(self, prompt: Prompt, steps: Sequence[str]) -> ScoringInput:
        turns = []
        for step in steps:
            turns.append({"role": "user", "content": step})
            turns.append({"role": "assistant", "content": f"{STEP}{self.good}"})
        # The prompt opens the first turn.
        question = f"{PROMPT_START}{self._text(prompt).strip()}{PROMPT_END}"
        turns[0]["content"] = f"{question} {steps[0]}"
        # Read one token before the answer: the logits there predict it.
        return encode_marked(self.tokenizer, self._rendered(turns), len(steps), False, self.candidates[0], shift=-1)


register_prm_format(
    "chat_turn_prm",
    ChatTurnScorer,
    help="The answer `+` or `-` to the step as a chat turn (RLHFlow).",
    is_causal=True,
    published_ids=r"llama3\.1-8b-prm",
)


class QwenMathScorer(PRMScorer):
    """Qwen2.5-Math-PRM: a head of two classes, read at a marker token behind every step of a chat answer.

    A published model is `Qwen/Qwen2.5-Math-PRM-7B`; any model whose logits have two classes per token will do.
    Checkpoints of that architecture load without code from the Hub. Messages keep their roles, the system's too,
    unless `prompt_text` is given.

    Args:
        marker (`str`, *optional*, defaults to `"<extra_0>"`): One token of the vocabulary.
        auto_class (`str`, *optional*, defaults to `"AutoModelForTokenClassification"`): Loads a checkpoint of another
            architecture; `"AutoModel"` with `trust_remote_code=True` runs the repository's own class.
        **options: See [`PRMScorer`].

    Raises:
        `InputError`: A marker that is not one token, a tokenizer without chat template, a head that has not two
            classes, and the errors of [`PRMScorer`].

    Source: arXiv 2501.07301, and the code on its model card.
    """

    outputs = 2
    settings: ClassVar = {"marker": "<extra_0>", "auto_class": "AutoModelForTokenClassification"}
    is_chat = True


register_prm_format(
    "qwen_math_prm",
    QwenMathScorer,
    help="A head of two classes at `<extra_0>` behind the step (Qwen2.5-Math-PRM).",
    is_causal=True,
    architecture="Qwen2ForProcessRewardModel",
)


class TokenClassificationScorer(PRMScorer):
    """Step rewards from an `AutoModelForTokenClassification` with two classes, such as `train-prm` makes.

    Args:
        step_separator (`str`, *optional*): What followed every step in training. Defaults to what `train-prm` noted
            in the model's config, else to a line break, TRL's default.
        **options: See [`PRMScorer`].

    Attributes:
        is_causal (`bool`, *optional*): `True` of a decoder, `False` of an encoder, `None` before it is known.

    Raises:
        `InputError`: A head that is missing or has not two classes, and the errors of [`PRMScorer`].
    """

    auto_class = "AutoModelForTokenClassification"
    outputs = 2
    settings: ClassVar = {"step_separator": None}  # until the model says

    def _load(self, model: Model) -> "PreTrainedModel":
        loaded = super()._load(model)
        # `train-prm` notes it in the model's configuration.
        if self.step_separator is None:
            self.step_separator = getattr(loaded.config, "step_separator", TRL_SEPARATOR)
        self.is_causal = is_causal(loaded)
        return loaded

    def _encode(self, prompt: Prompt, steps: Sequence[str]) -> ScoringInput:
        return encode_piecewise(self.tokenizer, self._text(prompt), steps, self.step_separator)


register_prm_format(
    "token_classification_prm",
    TokenClassificationScorer,
    help="Class 1 of two at the step's last token (`trl-drgrpo train-prm`, TRL's former trainer).",
    is_causal=None,  # a decoder or an encoder, as the model's configuration says
    architecture="ForTokenClassification",
)


class SkyworkScorer(PRMScorer):
    r"""Skywork-o1-Open-PRM: Qwen2 with a value head, read at the step token behind every step.

    The model was trained on lines: each line of a step is followed by the step token, as in the published code, and
    the step's score is the one at its last line. A published model is `Skywork/Skywork-o1-Open-PRM-Qwen-2.5-1.5B`,
    which loads without code from the Hub; any model with one output per token will do.

    Args:
        step_token (`str`, *optional*, defaults to a line break): One token of the vocabulary.
        **options: See [`PRMScorer`].

    Raises:
        `InputError`: A step token that is not one token, a checkpoint without its head, a head of other outputs, and
            the errors of [`PRMScorer`].
    """

    auto_class = "Qwen2ForPrmModel"
    outputs = 1
    settings: ClassVar = {"step_token": "\n"}
    step_token: str

    def _load(self, model: Model) -> "PreTrainedModel":
        self._token("step_token", self.step_token)
        return super()._load(model)

    def _encode(self, prompt: Prompt, steps: Sequence[str]) -> ScoringInput:
        lines = []
        last_lines = []  # index of each step's last line
        for step in steps:
            lines += step.split(self.step_token)
            last_lines.append(len(lines) - 1)
        row = encode_piecewise(self.tokenizer, self._text(prompt) + "\n", lines, self.step_token)
        positions = [row.positions[line] for line in last_lines]
        return replace(row, positions=positions)


register_prm_format(
    "skywork_prm",
    SkyworkScorer,
    help="A value head at the line break behind the step (Skywork-o1-Open-PRM).",
    is_causal=True,
    architecture="Qwen2ForPrmModel",
)
