"""`python -m deploy.tpu_decode`; see `benchmarks/tpu/decode_segment.py`."""

import sys

from benchmarks.tpu.decode_segment import main

if __name__ == "__main__":
    sys.exit(main())
