"""`python -m kernels.tpu_report`; see `kernels/tpu_report/cli.py`."""

import sys

from kernels.tpu_report.cli import main

sys.exit(main())
