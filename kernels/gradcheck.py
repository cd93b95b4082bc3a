"""`python -m kernels.gradcheck`; see `benchmarks/gradcheck/cli.py`."""

import sys

from benchmarks.gradcheck.cli import main

if __name__ == "__main__":
    sys.exit(main())
