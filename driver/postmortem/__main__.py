"""`python -m driver.postmortem`; see `driver/postmortem/archive.py`."""

import sys

from driver.postmortem.archive import main
from services.process.terminal_text import protect_terminal

if __name__ == "__main__":
    protect_terminal()
    sys.exit(main())
