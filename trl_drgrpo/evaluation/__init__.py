"""Evaluation: pass@1 and pass@k of a model on a dataset with a reward, with intervals, against another model.

`models.py` loads, `running.py` samples and scores, `results.py` makes numbers of the samples (the estimator and its
interval), `table.py` shows them and states them in a model card. Samples are written as they come:
an evaluation that was killed goes on.

Names resolve on first use: importing this package loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from trl_drgrpo.common.lazy import attach

if TYPE_CHECKING:
    from trl_drgrpo.evaluation.results import pass_at_k as pass_at_k

attach(__name__)
