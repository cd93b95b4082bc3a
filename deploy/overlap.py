"""`python -m deploy.overlap`; see `benchmarks/overlap.py`."""

import sys

from benchmarks.overlap import main

if __name__ == "__main__":
    sys.exit(main())
