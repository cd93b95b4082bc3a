"""`python -m rollout_worker.bench`; see `rollout_worker/bench/cli.py`."""

import sys

from rollout_worker.bench.cli import main

sys.exit(main())
