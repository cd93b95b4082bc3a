"""`python -m deploy.tpu_check`; see `benchmarks/tpu/check.py`."""

import sys

from benchmarks.tpu.check import main

if __name__ == "__main__":
    sys.exit(main())
