"""A learner process that is killed at its worst moments gives the weights of one that was not."""

import pathlib
import signal
import subprocess
import sys

import pytest

from services.process import failpoints
from tests.tiny_model import write_tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture(scope="module")
def child():
    """Runs a module in a process; all of them share what JAX has compiled."""

    def run(module, *arguments):
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    return run


def test_kills_while_updating_publishing_and_checkpointing_change_nothing(
    child, tmp_path, tmp_path_factory
):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    points, learner = tmp_path / "points", "tests.learner.learner_child"
    undisturbed = child(learner, model, tmp_path / "undisturbed", points)
    assert undisturbed.returncode == 0, undisturbed.stderr

    folder = tmp_path / "run"
    for name, action in (
        ("learner.checkpoint", "kill"),  # the first one: there is none to go back to
        ("learner.update", "skip 1 then kill"),  # written down, gradients made
        ("learner.publish", "skip 2 then kill"),
        ("learner.update", "kill"),  # while it is made again
        ("learner.checkpoint", "kill"),
    ):
        failpoints.arm(points, name, action)
        killed = child(learner, model, folder, points)
        assert killed.returncode == -signal.SIGKILL, (name, killed.stdout, killed.stderr)
    finished = child(learner, model, folder, points)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == undisturbed.stdout

    verified = child("driver.verify_resume", folder)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert verified.stdout.endswith("verify_resume: step 5 made again, weights equal\n")
