"""`python -m learner.delta_bench`; see `benchmarks/transfer/update_delta.py`."""

import sys

from benchmarks.transfer.update_delta import main

if __name__ == "__main__":
    sys.exit(main())
