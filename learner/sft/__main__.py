"""`python -m learner.sft`; see `driver/sft/cli.py`."""

import sys

from driver.sft.cli import main

if __name__ == "__main__":
    sys.exit(main())
