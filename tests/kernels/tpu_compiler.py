"""Asks the TPU's own compiler, which needs libtpu and no TPU, in a process of its own."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)


def run_with_compiler(program: str, *, timeout_s: float = 400) -> None:
    """Runs Python text that compiles for a described TPU; what it raises fails the test."""
    environment = dict(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v6e-8",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_LOG_DIR="disabled",
        TPU_MIN_LOG_LEVEL="2",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
