"""`python -m driver.top`; see `driver/terminal/top.py`."""

import sys

from driver.terminal.top import main

if __name__ == "__main__":
    sys.exit(main())
