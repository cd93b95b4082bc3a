"""Asks the TPU's own compiler, which needs libtpu and no TPU, in a process of its own."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from driver.chip_plan.chips import LIBTPU_ENVIRONMENT

ROOT = pathlib.Path(__file__).resolve().parents[2]

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)


def run_with_compiler(program: str, *, timeout_s: float = 400) -> None:
    """Runs Python text that compiles for a described TPU; what it raises fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | LIBTPU_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
