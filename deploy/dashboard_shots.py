"""`python -m deploy.dashboard_shots`; see `benchmarks/dashboard/screenshots.py`."""

import sys

from benchmarks.dashboard.screenshots import main

if __name__ == "__main__":
    sys.exit(main())
