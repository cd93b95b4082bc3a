"""Checkpoints that are written beside the training: whole or not taken, whatever ends them."""

import json
import pathlib
import shutil
import threading

import jax
import numpy as np
import pytest

from learner.durable.certificate import make_certificate
from learner.durable.checkpoint import CheckpointFolder
from learner.durable.checkpoint_writer import CheckpointBroken, CheckpointJob, CheckpointWriter
from learner.durable.spool import Spool, SpoolFailed
from learner.update.state import TrainState
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
    learner.begin_save(1, RUN_STATE)
    assert gate.reached.wait(HANG_S) and learner.saving == 1
    assert [update(learner, step).saved for step in (2, 3)] == [[], []]
    assert not list((tmp_path / "checkpoints").glob("step-????????"))
    assert segments(tmp_path) == ["step-00000000.bin", "step-00000001.bin"]
    gate.opened.set()
    learner._writer.wait()
    report = update(learner, 4)
    assert [(saved.step, saved.problem) for saved in report.saved] == [(1, "")]
    assert report.saved[0].write_s > 0 and report.saved[0].blocked_s > 0
    assert learner.saving is None and segments(tmp_path) == ["step-00000001.bin"]
    folder = tmp_path / "checkpoints" / "step-00000001"
    assert json.loads((folder / "certificate.json").read_text()) == kept.plain()

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
    learner._writer.wait()
    monkeypatch.undo()
    report = update(learner, 3)
    (saved,) = report.saved
    assert saved.step == 2
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
    learner.begin_save(2, RUN_STATE)
    failed = learner.save(3, RUN_STATE)
    for step, one in zip((1, 2, 3), failed, strict=True):
        assert one.problem.startswith(f"the checkpoint of step {step} could not be written to")
    (tmp_path / "checkpoints").unlink()
    (saved,) = learner.save(3, RUN_STATE)
    assert (saved.step, saved.problem) == (3, "")


def test_an_update_that_ends_without_a_report_loses_none_of_a_checkpoint(start, tmp_path):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    learner._writer.wait()
    with pytest.raises(TimeoutError, match="g2-0"):
        learner.update(names(2), [], 0.0)
    assert [saved.step for saved in update(learner, 2).saved] == [1]
    learner.begin_save(2, RUN_STATE)
    assert [saved.step for saved in learner.end_saving()] == [2]


def test_a_learner_that_ends_completes_the_one_under_way_and_reports_it(start, tmp_path):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    (saved,) = learner.close()
    assert (saved.step, saved.problem) == (1, "") and learner.saving is None
    assert (tmp_path / "checkpoints" / "step-00000001").is_dir()
    Spool(tmp_path / "spool", "run").claim(0.0)  # another learner may write


def test_a_learner_that_ends_keeps_others_away_while_one_is_still_written(start, tmp_path, gate):
    gate.at = "learner.complete"
    learner = start(tmp_path, checkpoint_wait_s=0.01)
    learner.publish()
    train(learner, 1)
    learner.begin_save(1, RUN_STATE)
    assert gate.reached.wait(HANG_S)
    with pytest.raises(TimeoutError, match="step 1 is still being written after 0.01 s"):
        learner.close()
    other = Spool(tmp_path / "spool", "run")
    with pytest.raises(SpoolFailed, match="another learner of this run has held it"):
        other.claim(0.0)
    gate.opened.set()
    learner._writer.wait(HANG_S)
    learner.close()
    other.claim(0.0)
    other.close()


def test_a_resume_looks_for_checkpoints_once_the_learner_before_has_ended(
    start, tmp_path, digests, gate, monkeypatch
):
    before = start(tmp_path, keep_checkpoints=1)
    before.publish()
    train(before, 1)
    before.save(1, RUN_STATE)
    train(before, 2)
    gate.at = "learner.complete"
    before.begin_save(2, RUN_STATE)
    assert gate.reached.wait(HANG_S)
    after = start(tmp_path, keep_checkpoints=1)
    claim = Spool.claim

    def claim_late(spool, *given):
        gate.opened.set()
        before.close()  # with the checkpoint of step 2, which lets that of step 1 go
        claim(spool, *given)

    monkeypatch.setattr(Spool, "claim", claim_late)
    restored = after.restore()
    assert restored is not None and (restored.step, restored.skipped) == (2, [])
    monkeypatch.undo()
    after.publish()
    assert train(after, 3) == [digests[3]]


def test_what_the_disk_is_not_to_blame_for_ends_the_next_update(start, tmp_path, monkeypatch):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)

    def fail(*arguments, **named):
        raise TypeError("made up")

    with monkeypatch.context() as patched:
        patched.setattr("learner.durable.checkpoint.write_state", fail)
        learner.begin_save(1, RUN_STATE)
        learner._writer.wait()
    push(learner, groups_of(learner, 2))
    with pytest.raises(CheckpointBroken, match="checkpoint of step 1 was not written.*made up"):
        learner.update(names(2), [], WAIT_S)
    assert learner.policy_version == 1
    assert [saved.step for saved in learner.save(1, RUN_STATE)] == [1]


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
        learner.end_saving,
        learner._writer.close,
    ):
        with pytest.raises(TimeoutError, match=still):
            wait()
    gate.opened.set()
    learner._writer.wait(HANG_S)
    assert [saved.step for saved in learner.save(2, RUN_STATE)] == [1, 2]


def test_a_kept_best_one_is_among_complete_ones_only(tmp_path, gate):
    learner_state = jax.tree.map(jax.numpy.asarray, {"weight": np.arange(4.0)})
    folder = CheckpointFolder(tmp_path, keep=1)
    writer = CheckpointWriter(folder, on_certified=lambda step, saved: [], timeout_s=HANG_S)

    def job(step):
        state = TrainState(params=learner_state, opt_state=(), update_count=jax.numpy.int32(step))
        return CheckpointJob(
            step=step,
            state=state,
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
    learner._writer.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    (failed,) = update(learner, 3).saved
    assert failed.step == 2 and "No space left on device" in failed.problem
