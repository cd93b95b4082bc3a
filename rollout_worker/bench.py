"""`python -m rollout_worker.bench`; see `benchmarks/decode/cli.py`."""

import sys

from benchmarks.decode.cli import main

if __name__ == "__main__":
    sys.exit(main())
