"""The short form of `python -m deploy.chaos`, as a user runs it."""

import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks.chaos.campaign import RECOVERY_S
from tests.deadlines import HANG_S

ROOT = pathlib.Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.service]


PATIENCE = HANG_S / RECOVERY_S
"""A busy machine is no failure: only what hangs is."""


def test_a_run_of_episodes_that_loses_processes_comes_to_the_same_parameters(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deploy.chaos", "--short"),
            *("--patience", str(PATIENCE), "--folder", str(tmp_path / "chaos")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(
        r"chaos: faults 6, lost 0, duplicated 0, parameters equal, seconds \d+", last
    )
