r"""Process reward models in Math-Shepherd's manner whose marker is a run of line breaks: VersaPRM, Math-PSA.

| format | marker | input | read at the marker |
|---|---|---|---|
| VersaPRM (arXiv 2502.06737) | ` \n\n\n\n` | `question \n\n`, `step` + marker, ... | `+` against `-` |
| Math-PSA (arXiv 2410.09671) | ` \n\n\n\n\n` | `question `, `Step 1: ...` + marker, a space, ... | ` +` against ` -` |

The space before the line breaks belongs to the marker: it keeps the tokenizers of Llama 3 and Qwen2.5 from joining the
first break with a full stop, and with it the marker is one token. Runs of as many breaks that the policy wrote are
taken out of prompts and steps. Source: the two authors' evaluation code; no weights of either were run here.
"""

from collections.abc import Sequence
from typing import Any

from trl_drgrpo.process_rewards.encoding import ScoringInput
from trl_drgrpo.process_rewards.marker import MathShepherdScorer


class VersaScorer(MathShepherdScorer):
    r"""VersaPRM and Llama-PRM800K: Llama 3 that predicts `+` or `-` at ` \n\n\n\n`; steps are not numbered.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id (`UW-Madison-Lee-Lab/VersaPRM`) or model.
        tokenizer, marker, good, bad, number_steps, name, **options: As in [`MathShepherdScorer`].

    Raises:
        `InputError`: As [`MathShepherdScorer`].
    """

    layout = (" \n\n", "", "")

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        marker: str = " \n\n\n\n",
        good: str | int = "+",
        bad: str | int = "-",
        number_steps: bool = False,
        name: str = "versa_prm",
        **options: Any,
    ):
        super().__init__(
            model,
            tokenizer,
            marker=marker,
            good=good,
            bad=bad,
            number_steps=number_steps,
            name=name,
            **options,
        )

    def _encode(self, prompt: Any, steps: Sequence[str]) -> ScoringInput:
        return super()._encode(prompt, [step.strip() for step in steps])


class MathPSAScorer(VersaScorer):
    r"""OpenR's Math-PSA: Qwen2.5-Math-7B-Instruct that predicts ` +` or ` -` at ` \n\n\n\n\n` behind numbered steps.

    The published checkpoint is an adapter, which loads on the base that it names; name the base's tokenizer too.

    Args:
        model (`str` or `PreTrainedModel`): Path, Hub id or model; an adapter's too.
        tokenizer, marker, good, bad, number_steps, name, **options: As in [`MathShepherdScorer`].

    Raises:
        `InputError`: As [`MathShepherdScorer`].
    """

    layout = (" ", "", " ")

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        marker: str = " \n\n\n\n\n",
        good: str | int = " +",
        bad: str | int = " -",
        number_steps: bool = True,
        name: str = "math_psa_prm",
        **options: Any,
    ):
        super().__init__(
            model,
            tokenizer,
            marker=marker,
            good=good,
            bad=bad,
            number_steps=number_steps,
            name=name,
            **options,
        )
