"""`python -m driver.scale`; see `driver/terminal/scale.py`."""

import sys

from driver.terminal.scale import main

if __name__ == "__main__":
    sys.exit(main())
