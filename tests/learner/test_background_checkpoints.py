"""Checkpoints that are written beside the training: whole or not taken, whatever ends them."""

import errno
import json
import pathlib
import shutil
import threading

import jax
import numpy as np
import pytest

from learner.durable import checkpoint_writer
from learner.durable.certificate import make_certificate
from learner.durable.checkpoint import CheckpointFailed, CheckpointFolder
from learner.durable.checkpoint_writer import (
    CheckpointBroken,
    CheckpointJob,
    CheckpointWriter,
    copy_to_host,
)
from services.process import failpoints
from tests.deadlines import HANG_S
from tests.learner.tiny_learner import RUN_STATE, WAIT_S, groups_of, names, push, replayed, train

pytestmark = pytest.mark.slow


@pytest.fixture
def gate(monkeypatch):
    """Holds the thread of a checkpoint at a failpoint until it is opened."""

    class Gate:
        def __init__(self):
            self.at = ""
            self.reached, self.opened = threading.Event(), threading.Event()

        def reach(self, name, path=None):
            if name == self.at:
                self.reached.set()
                assert self.opened.wait(HANG_S)

    made = Gate()
    monkeypatch.setattr(failpoints, "reach", made.reach)
    yield made
    made.opened.set()


def segments(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (folder / "spool").iterdir())


def update(learner, step):
    push(learner, groups_of(learner, step))
    report = learner.update(names(step), [], WAIT_S)
    learner.digest(step, WAIT_S)  # issued, as a resume finds it
    return report


def test_training_goes_on_beside_a_checkpoint_which_holds_the_state_of_its_step(
    start, tmp_path, digests, gate
):
    gate.at = "learner.copied"
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    kept = make_certificate(learner._core.state, seed=0, driver_state=RUN_STATE)
    assert learner.begin_save(1, RUN_STATE) == []
    assert gate.reached.wait(HANG_S) and learner.saving == 1
    assert [update(learner, step).saved for step in (2, 3)] == [[], []]
    assert not list((tmp_path / "checkpoints").glob("step-????????"))
    assert segments(tmp_path) == ["step-00000000.bin", "step-00000001.bin"]
    gate.opened.set()
    learner._writer.wait()
    report = update(learner, 4)
    assert [(saved.step, saved.problem) for saved in report.saved] == [(1, "")]
    assert report.metrics["checkpoint/write_s"] > 0 and report.metrics["checkpoint/blocked_s"] > 0
    assert learner.saving is None and segments(tmp_path) == ["step-00000001.bin"]
    written = json.loads((pathlib.Path(report.saved[0].folder) / "certificate.json").read_text())
    assert written == kept.plain()

    after = start(tmp_path)
    restored = after.restore()
    assert restored is not None and restored.step == 1
    assert replayed(after, restored) == [(2, "equal"), (3, "equal"), (4, "equal")]
    assert after.digest(4, WAIT_S) == digests[4]


@pytest.mark.parametrize("at", ["learner.copied", "learner.checkpoint", "learner.complete"])
def test_a_learner_that_ends_while_one_is_written_resumes_from_the_one_before(
    start, tmp_path, digests, gate, at
):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    learner._writer.wait()
    train(learner, 2)
    gate.at = at
    learner.begin_save(2, RUN_STATE)
    assert gate.reached.wait(HANG_S)
    train(learner, 3)
    left = tmp_path / "left"  # what a kill leaves: the other one goes on in its own folder
    shutil.copytree(tmp_path, left, ignore=shutil.ignore_patterns("left"))
    gate.opened.set()

    after = start(left)
    restored = after.restore()
    assert restored is not None and restored.step == 1
    assert replayed(after, restored) == [(2, "equal"), (3, "equal")]
    assert train(after, 4) == [digests[4]]
    after.save(4, RUN_STATE)
    assert sorted(p.name for p in (left / "checkpoints").iterdir()) == [
        "step-00000001",
        "step-00000004",
    ]


def test_the_first_one_that_is_cut_leads_back_to_the_start(start, tmp_path, digests, gate):
    gate.at = "learner.checkpoint"
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    assert gate.reached.wait(HANG_S)
    train(learner, 2)
    left = tmp_path / "left"
    shutil.copytree(tmp_path, left, ignore=shutil.ignore_patterns("left"))
    gate.opened.set()

    after = start(left)
    restored = after.restore()
    assert restored is not None and restored.step == 0
    assert replayed(after, restored) == [(1, "equal"), (2, "equal")]
    assert train(after, 3) == [digests[3]]


def test_a_folder_that_vanishes_is_reported_by_the_next_update_and_the_run_goes_on(
    start, tmp_path, digests, monkeypatch
):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    learner._writer.wait()
    aside = tmp_path / "aside"

    def vanish(name, path=None):
        if name == "learner.checkpoint":
            (tmp_path / "checkpoints").rename(aside)

    train(learner, 2)
    monkeypatch.setattr(failpoints, "reach", vanish)
    learner.begin_save(2, RUN_STATE)
    with pytest.raises(OSError):  # in its thread
        learner._writer._under_way[1].result(HANG_S)
    monkeypatch.undo()
    report = update(learner, 3)
    (saved,) = report.saved
    assert (saved.step, saved.folder) == (2, "")
    assert "the checkpoint of step 2 could not be written to" in saved.problem
    assert "No such file or directory" in saved.problem
    assert segments(tmp_path) == ["step-00000001.bin", "step-00000002.bin"]
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    aside.rename(tmp_path / "checkpoints")

    after = start(tmp_path)
    restored = after.restore()
    assert restored is not None and restored.step == 1
    assert replayed(after, restored) == [(2, "equal"), (3, "equal")]
    assert after.digest(3, WAIT_S) == digests[3]


def test_a_file_in_place_of_the_folder_is_reported_until_it_is_gone(start, tmp_path):
    learner = start(tmp_path)
    learner.publish()
    (tmp_path / "checkpoints").write_text("a file")
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    learner._writer.wait()
    (failed,) = learner.begin_save(2, RUN_STATE)
    assert failed.step == 1
    assert failed.problem.startswith("the checkpoint of step 1 could not be written to")
    learner._writer.wait()
    with pytest.raises(CheckpointFailed, match="the checkpoint of step 3 could not be written"):
        learner.save(3, RUN_STATE)
    (tmp_path / "checkpoints").unlink()
    saved = learner.save(3, RUN_STATE)
    assert (saved.step, saved.problem) == (3, "")
    assert [one.step for one in saved.earlier] == [2]


def test_what_the_disk_is_not_to_blame_for_ends_the_next_update(start, tmp_path, monkeypatch):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)

    def fail(*arguments, **named):
        raise TypeError("made up")

    with monkeypatch.context() as patched:
        patched.setattr("learner.durable.checkpoint.write_state", fail)
        learner.begin_save(1, RUN_STATE)
        with pytest.raises(TypeError):
            learner._writer._under_way[1].result(HANG_S)
    push(learner, groups_of(learner, 2))
    with pytest.raises(CheckpointBroken, match="checkpoint of step 1 was not written.*made up"):
        learner.update(names(2), [], WAIT_S)
    assert learner.policy_version == 1
    assert learner.save(1, RUN_STATE).step == 1, "the run can still end in a checkpoint"


def test_a_new_checkpoint_the_last_one_and_the_end_wait_for_the_one_under_way(
    start, tmp_path, gate
):
    gate.at = "learner.copied"
    learner = start(tmp_path, checkpoint_wait_s=0.01)
    learner.publish()
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    assert gate.reached.wait(HANG_S)
    still = "the checkpoint of step 1 is still being written after 0.01 s, about to begin"
    for wait in (
        lambda: learner.begin_save(2, RUN_STATE),
        lambda: learner.save(2, RUN_STATE),
        learner._writer.close,
    ):
        with pytest.raises(TimeoutError, match=still):
            wait()
    gate.opened.set()
    learner._writer.wait(HANG_S)
    assert [saved.step for saved in learner.save(1, RUN_STATE).earlier] == [1]


def test_a_kept_best_one_is_among_complete_ones_only(tmp_path, gate):
    learner_state = jax.tree.map(jax.numpy.asarray, {"weight": np.arange(4.0)})
    folder = CheckpointFolder(tmp_path, keep=1)
    writer = CheckpointWriter(folder, on_certified=lambda step, saved: [], timeout_s=HANG_S)

    def job(step):
        state = checkpoint_writer.TrainState(
            params=learner_state, opt_state=(), update_count=jax.numpy.int32(step)
        )
        return CheckpointJob(
            step=step,
            state=copy_to_host(state),
            record={"step": step},
            certify=lambda state: make_certificate(state, seed=0, driver_state={}),
            scores={1: 0.9, 2: 0.1, 3: 0.2},
        )

    for step in (1, 2):
        writer.submit(lambda step=step: job(step))
    writer.wait()
    gate.at = "learner.checkpoint"
    writer.submit(lambda: job(3))
    assert gate.reached.wait(HANG_S)
    assert folder.complete_steps() == [2] and (tmp_path / "best" / "step-00000001").is_dir()
    gate.opened.set()
    assert [saved.step for saved in (writer.wait(), writer.take_ended())[1]] == [1, 2, 3]
    assert folder.complete_steps() == [3] and (tmp_path / "best" / "step-00000001").is_dir()


def test_a_copy_on_the_host_shares_no_memory_with_the_devices(start, tmp_path):
    learner = start(tmp_path)
    copied = copy_to_host(learner._core.state)
    for ours, theirs in zip(
        jax.tree.leaves(copied), jax.tree.leaves(learner._core.state), strict=True
    ):
        assert type(ours) is np.ndarray and ours.dtype == theirs.dtype
        assert not np.shares_memory(ours, np.asarray(theirs))
        np.testing.assert_array_equal(ours, np.asarray(theirs))


def test_a_full_disk_names_the_checkpoint_and_leaves_the_one_before(start, tmp_path):
    points = tmp_path / "points"
    learner = start(tmp_path)
    failpoints.install(str(points))
    learner.publish()
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    learner._writer.wait()
    failpoints.arm(points, "learner.checkpoint", "enospc")
    train(learner, 2)
    learner.begin_save(2, RUN_STATE)
    with pytest.raises(OSError) as raised:
        learner._writer._under_way[1].result(HANG_S)
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    (failed,) = update(learner, 3).saved
    assert failed.step == 2 and "No space left on device" in failed.problem
