"""`python -m services.bench`; see `benchmarks/transfer/cli.py`."""

import sys

from benchmarks.transfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
