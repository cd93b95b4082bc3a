"""`python -m learner.ab`; see `benchmarks/ab/cli.py`."""

import sys

from benchmarks.ab.cli import main

if __name__ == "__main__":
    sys.exit(main())
