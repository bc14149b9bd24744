"""`python -m trl_drgrpo`: the same as the console script `trl-drgrpo`."""

import sys

from trl_drgrpo.cli.main import main

sys.exit(main())
