"""`python -m deploy.dashboard_bench`; see `benchmarks/dashboard/cli.py`."""

import sys

from benchmarks.dashboard.cli import main

if __name__ == "__main__":
    sys.exit(main())
