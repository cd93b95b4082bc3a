"""`python -m driver.top`; see `driver/terminal/top.py`."""

import sys

from driver.terminal.top import main
from services.process.terminal_text import protect_terminal

if __name__ == "__main__":
    protect_terminal()
    sys.exit(main())
