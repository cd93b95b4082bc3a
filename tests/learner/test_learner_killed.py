"""A learner process that is killed at its worst moments gives the weights of one that was not."""

import multiprocessing
import pathlib
import signal
import subprocess
import sys

import pytest

from services.process import failpoints
from tests.learner import learner_child
from tests.tiny_model import write_tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture(scope="module")
def processes():
    """Makes processes that begin as copies of one that has imported the learner."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([learner_child.__name__])
    return context


IN_TURN = (
    ("learner.checkpoint", "kill"),  # the first one: there is none to go back to
    ("learner.update", "skip 1 then kill"),  # written down, gradients made
    ("learner.publish", "skip 2 then kill"),
    ("learner.update", "kill"),  # while it is made again
    ("learner.checkpoint", "kill"),
)
BESIDE_TRAINING = (
    ("learner.copied", "kill"),
    ("learner.checkpoint", "kill"),
    ("learner.complete", "kill"),  # whole, and without its name
    ("learner.retention", "kill"),  # whole, and the one before is still there
)


# Beside a checkpoint one step more may be trained, and is not saved when it is made again.
@pytest.mark.parametrize(
    "steps, background, kills", [(5, False, IN_TURN), (9, True, BESIDE_TRAINING)]
)
def test_kills_while_updating_publishing_and_checkpointing_change_nothing(
    processes, tmp_path, tmp_path_factory, steps, background, kills
):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    points = tmp_path / "points"

    def run(folder: pathlib.Path) -> int | None:
        """The exit code of a learner that goes on with what is in its folder."""
        child = processes.Process(
            target=learner_child.main, args=(model, folder, points, steps, background)
        )
        child.start()
        child.join()
        return child.exitcode

    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "run"
    assert run(undisturbed) == 0
    for name, action in kills:
        failpoints.arm(points, name, action)
        assert run(folder) == -signal.SIGKILL, (name, action)
    assert run(folder) == 0
    digest = (folder / learner_child.DIGEST).read_text()
    assert digest and digest == (undisturbed / learner_child.DIGEST).read_text()

    verified = subprocess.run(
        [sys.executable, "-m", "driver.verify_resume", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert verified.stdout.endswith(" made again, weights equal\n")
