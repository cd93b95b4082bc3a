"""`python -m kernels.tpu_report`; see `benchmarks/tpu/cli.py`."""

import sys

from benchmarks.tpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
