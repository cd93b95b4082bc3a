"""`python -m deploy.tpu_decode`; see `benchmarks/tpu/decode.py`."""

import sys

from benchmarks.tpu.decode import main

if __name__ == "__main__":
    sys.exit(main())
