"""`python -m deploy.tpu_check`; see `benchmarks/tpu/run_programs.py`."""

import sys

from benchmarks.tpu.run_programs import main

if __name__ == "__main__":
    sys.exit(main())
