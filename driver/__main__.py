"""`python -m driver`: see driver/cli.py."""

import sys

from driver.cli import main

if __name__ == "__main__":
    sys.exit(main())
