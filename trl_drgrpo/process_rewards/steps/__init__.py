"""A completion becomes steps: what a process reward is given for.

    segmenter = step_segmenter("\\n\\n")
    steps = segmenter(completion_ids, tokenizer)  # Steps(texts=(...), ends=(...))

Steps partition the completion: every token is in exactly one, or in the closing, the tokens behind the last separator
that hold nothing to read (EOS). Texts are slices of the decoded completion, special tokens included; ends are
inclusive indices of completion tokens, what `step_token_advantages` takes.

Reading order: `alignment.py` (where a completion can be cut), `segmenter.py` (where a step should end, and the cut).
No torch, trl or transformers: the tokenizer is passed in. Names resolve on first use.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.steps.segmenter import Steps as Steps
    from trl_drgrpo.process_rewards.steps.segmenter import StepSegmenter as StepSegmenter
    from trl_drgrpo.process_rewards.steps.segmenter import one_step_frac as one_step_frac
    from trl_drgrpo.process_rewards.steps.segmenter import step_segmenter as step_segmenter

DEFAULT_SEPARATOR = "\n\n"  # of everything that cuts completions or joins steps

attach(__name__)
