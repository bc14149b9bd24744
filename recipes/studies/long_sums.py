"""The list sums of `trl-drgrpo demo --process` (`trl_drgrpo.demo.build`), 8 to 10 digits, as the studies use them."""

from functools import partial

import frame  # noqa: F401 (first: it sets the environment)

from trl_drgrpo.demo import task
from trl_drgrpo.demo.build import TERMS

MAX_COMPLETION = 112  # tokens; the longest demonstration has 101
make_problems = partial(task.make_problems, terms=TERMS)
make_dataset = partial(task.make_dataset, terms=TERMS)
