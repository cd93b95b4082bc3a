"""`python -m deploy.dashboard_shots`; see `benchmarks/dashboard/shots.py`."""

import sys

from benchmarks.dashboard.shots import main

if __name__ == "__main__":
    sys.exit(main())
