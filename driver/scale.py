"""`python -m driver.scale`; see `driver/terminal/scale.py`."""

import sys

from driver.terminal.scale import main
from services.process.terminal_text import protect_terminal

if __name__ == "__main__":
    protect_terminal()
    sys.exit(main())
