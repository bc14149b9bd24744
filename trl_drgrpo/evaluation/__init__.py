"""Evaluation: pass@1 and pass@k of a model on a dataset with a reward, with intervals, against another model.

`estimates.py` has the estimator and its interval, `sampling.py` and `running.py` sample and score, `results.py` makes
numbers of the samples, `table.py` shows them, `card.py` states them in a model card. Samples are written as they come:
an evaluation that was killed goes on.

Names resolve on first use: importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.evaluation.results import pass_at_k as pass_at_k

attach(__name__)
