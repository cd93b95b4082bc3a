"""`python -m kernels.gradcheck`; see `kernels/gradcheck/cli.py`."""

import sys

from kernels.gradcheck.cli import main

sys.exit(main())
