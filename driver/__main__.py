"""`python -m driver`: see driver/cli.py."""

import sys

from driver.cli import main
from services.process.terminal_text import protect_terminal

if __name__ == "__main__":
    protect_terminal()
    sys.exit(main())
