"""A step taken once more from a checkpoint: equal, different, or nothing to take."""

import dataclasses
import shutil

import jax
import pytest

from driver.verify_resume import main
from learner.core import LearnerCore
from learner.recorded_learner import RecordedLearner
from learner.resume_check import NothingToCheck, find_step
from services.process.phase_clock import PhaseClock
from services.wire.tls import RunAuthority
from tests.learner.tiny_learner import (
    RUN_STATE,
    WAIT_S,
    groups_of,
    learner_spec,
    names,
    push,
    train,
)
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled():
    """The programs of the run, which are those of the check too."""
    return {}


@pytest.fixture(autouse=True)
def same_programs_on_one_device(monkeypatch, compiled):
    def make(*args, **options):
        core = LearnerCore(*args, **options)
        core._programs.compiled = compiled
        return core

    monkeypatch.setattr("learner.resume_check.require_platform", lambda _: jax.devices()[:1])
    monkeypatch.setattr("learner.resume_check.LearnerCore", make)


@pytest.fixture(scope="module")
def run(tmp_path_factory, compiled):
    """Checkpoints of 1 and 2; then an empty step, step 3, and groups that no step has used."""
    folder = tmp_path_factory.mktemp("run")
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    spec = learner_spec(model, RunAuthority.create("run"), folder, keep_checkpoints=3)
    learner = RecordedLearner(spec, jax.devices()[:1], PhaseClock())
    learner._core._programs.compiled = compiled
    learner.publish()
    for step in (1, 2):
        train(learner, step)
        learner.save(step, RUN_STATE)
    push(learner, groups_of(learner, 8, version=2))
    learner.update([], names(8), WAIT_S)
    train(learner, 3)
    learner.save(3, RUN_STATE)
    shutil.rmtree(folder / "checkpoints" / "step-00000003")
    push(learner, groups_of(learner, 4))
    learner.close()
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def test_the_newest_checkpoint_with_a_step_after_it_is_found_and_its_step_made_again(run, capsys):
    recorded = find_step(run)
    assert (recorded.step, recorded.policy_version) == (2, 2)
    assert [group.group_id for group in recorded.groups] == names(3)
    assert main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("verify_resume: step 3 made again, weights equal\n")
    for part in ("data_order", "keys", "optimizer", "ledger", "weights", "whole", "version 3"):
        assert part in shown
    assert "NO" not in shown


def test_another_outcome_is_shown_and_named(run, capsys, monkeypatch):
    recorded = find_step(run, 1)
    other = dataclasses.replace(recorded, groups=recorded.groups[:1])
    monkeypatch.setattr("driver.verify_resume.find_step", lambda *_: other)
    assert main([str(run), "--step", "1"]) == 1
    shown = capsys.readouterr().out
    assert "step 2 made again, not equal: weights of version 2 (trained on 1 cpu devices" in shown


def test_a_model_that_is_gone_is_named_and_another_path_is_taken(run, capsys, monkeypatch):
    recorded = find_step(run)
    there = recorded.header.model_folder
    gone = dataclasses.replace(recorded.header, model_path="/gone/model", model_folder=None)
    moved = dataclasses.replace(recorded, header=gone)
    monkeypatch.setattr("driver.verify_resume.find_step", lambda *_: moved)
    assert main([str(run)]) == 2
    refusal = capsys.readouterr().err
    assert "/gone/model" in refusal and "give it by --model" in refusal
    assert main([str(run), "--model", there]) == 0


def test_a_damaged_checkpoint_is_passed_over(copy):
    (copy / "checkpoints" / "step-00000002" / "manifest.json").write_text("{}")
    with pytest.raises(NothingToCheck, match="step-00000002"):
        find_step(copy, 2)


def test_a_folder_without_anything_to_verify_says_why(copy, tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert "has no checkpoints/: give the output folder of a run" in capsys.readouterr().err
    assert main([str(copy), "--step", "7"]) == 2
    assert "has no checkpoint of step 7; it has [2, 1]" in capsys.readouterr().err
    shutil.rmtree(copy / "spool")
    assert main([str(copy)]) == 2
    assert "has no segment in spool/" in capsys.readouterr().err
