"""`python -m driver.postmortem`; see `driver/postmortem/archive.py`."""

import sys

from driver.postmortem.archive import main

if __name__ == "__main__":
    sys.exit(main())
