"""`python -m learner.delta_bench`; see `benchmarks/transfer/optimizer_delta.py`."""

import sys

from benchmarks.transfer.optimizer_delta import main

if __name__ == "__main__":
    sys.exit(main())
