"""`python -m driver.plan`; see `driver/chip_plan/cli.py`."""

import sys

from driver.chip_plan.cli import main
from services.process.terminal_text import protect_terminal

if __name__ == "__main__":
    protect_terminal()
    sys.exit(main())
