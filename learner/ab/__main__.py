"""`python -m learner.ab`; see `learner/ab/cli.py`."""

import sys

from learner.ab.cli import main

sys.exit(main())
