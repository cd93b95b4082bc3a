"""`python -m kernels.tpu_report`; see `benchmarks/tpu/kernel_report.py`."""

import sys

from benchmarks.tpu.kernel_report import main

if __name__ == "__main__":
    sys.exit(main())
