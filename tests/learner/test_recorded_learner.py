"""A learner that stops at any point and resumes gives the weights of one that never stopped."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from learner.durable.certificate import CertificateMismatch
from learner.durable.spool import SpoolFailed
from services.process import failpoints
from services.trajectories import group_buffer
from services.trajectories.group_buffer import NotStored
from services.trajectories.receipts import UnknownReceipt
from services.wire.messages import PushOutcome
from tests.learner.tiny_learner import (
    RUN_STATE,
    WAIT_S,
    groups_of,
    names,
    push,
    replayed,
    train,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("saved", [0, 1, 2])
def test_a_learner_that_was_restored_gives_the_digests_of_one_that_never_stopped(
    start, tmp_path, digests, saved
):
    """Stopped after update 3, with the groups of step 4 accepted, saved at 1, 2 or not at all."""
    before = start(tmp_path)
    before.publish()
    for step in (1, 2, 3):
        train(before, step)
        if step <= saved:
            before.save(step, RUN_STATE)
    push(before, groups_of(before, 4))

    after = start(tmp_path)
    restored = after.restore()
    assert (restored.step, restored.policy_version) == (saved, saved)
    assert restored.driver_state == (RUN_STATE if saved else None)
    assert [update.group_ids for update in restored.replay] == [
        names(step) for step in range(saved + 1, 4)
    ]
    assert [update.digest for update in restored.replay] == [
        digests[version] for version in range(saved + 1, 4)
    ]
    assert [report.group_id for report in restored.waiting] == names(4)
    assert [report.group_id for report in after.buffer.reports(names(4))] == names(4)
    assert replayed(after, restored) == [(version, "equal") for version in range(saved + 1, 4)]
    report = after.update(names(4), [], WAIT_S)
    assert report.replayed is None and report.policy_version == 4
    assert after.digest(4, WAIT_S) == digests[4]


def test_a_second_restart_in_the_middle_of_the_replay_loses_nothing(start, tmp_path, digests):
    before = start(tmp_path)
    before.publish()
    train(before, 1)
    before.save(1, RUN_STATE)
    train(before, 2, 3)
    middle = start(tmp_path)
    middle.restore()
    middle.publish()
    middle.update(names(2), [], WAIT_S)
    middle.save(2, RUN_STATE)  # while the update that makes 3 is yet to be made again
    push(middle, groups_of(before, 4))

    after = start(tmp_path)
    restored = after.restore()
    assert (restored.step, [u.policy_version for u in restored.replay]) == (2, [3])
    assert replayed(after, restored) == [(3, "equal")]
    after.update(names(4), [], WAIT_S)
    assert after.digest(4, WAIT_S) == digests[4]


def test_a_damaged_newest_checkpoint_is_made_up_for_by_the_spool_C01(start, tmp_path, digests):
    before = start(tmp_path)
    before.publish()
    for step in (1, 2):
        train(before, step)
        before.save(step, RUN_STATE)
    train(before, 3)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    after = start(tmp_path)
    restored = after.restore()
    assert restored.step == 1 and len(restored.skipped) == 1
    assert replayed(after, restored) == [(2, "equal"), (3, "equal")]
    assert train(after, 4) == [digests[4]]


def test_the_way_on_from_a_damaged_spool_leads_on_R07(start, tmp_path, digests):
    """What the message of a damaged spool says to do: move it away, and resume."""
    before = start(tmp_path)
    before.publish()
    train(before, 1)
    before.save(1, RUN_STATE)
    train(before, 2)
    segment = tmp_path / "spool" / "step-00000001.bin"
    content = segment.read_bytes()
    segment.write_bytes(content[:80] + bytes([content[80] ^ 1]) + content[81:])
    with pytest.raises(ValueError, match=f"damaged.*move {tmp_path / 'spool'} away"):
        start(tmp_path).restore()
    (tmp_path / "spool").rename(tmp_path / "spool.damaged")
    after = start(tmp_path)
    restored = after.restore()
    assert (restored.step, restored.replay, restored.waiting) == (1, [], [])
    after.publish()
    assert train(after, 2) == [digests[2]]


def test_a_first_checkpoint_that_was_cut_is_made_up_for_by_the_spool_C01(start, tmp_path, digests):
    before = start(tmp_path)
    before.publish()
    train(before, 1)
    (tmp_path / "checkpoints" / "step-00000001.writing").mkdir(parents=True)
    after = start(tmp_path)
    restored = after.restore()
    assert (restored.step, restored.driver_state) == (0, None)
    assert restored.skipped == ["step-00000001.writing: was not finished"]
    assert replayed(after, restored) == [(1, "equal")]
    after.save(1, RUN_STATE)
    assert train(after, 2) == [digests[2]]


def test_a_run_that_starts_has_nothing_to_restore_and_takes_no_spool_for_its_own(start, tmp_path):
    learner = start(tmp_path)
    assert learner.restore() is None
    learner.publish()
    again = start(tmp_path)
    with pytest.raises(ValueError, match="holds accepted groups of this run: go on with --resume"):
        again.publish()


def test_a_version_that_comes_out_different_voids_what_rests_on_it(start, tmp_path):
    before = start(tmp_path)
    before.publish()
    train(before, 1, 2)
    push(before, groups_of(before, 3))
    sampled_before = groups_of(before, 4, version=1)
    push(before, sampled_before)

    after = start(tmp_path)
    restored = after.restore()
    assert [update.policy_version for update in restored.replay] == [1, 2]
    shifted = jax.tree.map(lambda leaf: leaf + 1e-3, after._core.state.params)
    after.publish()
    after._core._state = dataclasses.replace(after._core.state, params=shifted)
    report = after.update(names(1), [], WAIT_S)
    assert report.replayed == "different" and report.digest != restored.replay[0].digest
    # Groups of step 2 and 4 were sampled under version 1, those of step 3 under 2.
    assert sorted(report.disowned) == names(2) + names(3) + names(4)
    assert {report.outcomes[name] for name in report.disowned} == {"dropped_error"}
    assert after.buffer.reports() == []
    with pytest.raises(UnknownReceipt):
        push(after, [dataclasses.replace(sampled_before[0], group_id="g9-9")])

    third = start(tmp_path)
    restored = third.restore()
    assert [update.policy_version for update in restored.replay] == [1]
    assert restored.replay[0].digest == report.digest


def test_groups_of_versions_to_come_wait_until_their_version_is_made_again(start, tmp_path):
    before = start(tmp_path)
    before.publish()
    train(before, 1)
    ahead = groups_of(before, 2)
    after = start(tmp_path)
    after.restore()
    after.publish()
    assert push(after, ahead[:1]) == [PushOutcome.ACCEPTED]
    with pytest.raises(TimeoutError, match="did not arrive"):
        after.update(names(2)[:1], [], 0.05)
    after.update(names(1), [], WAIT_S)
    assert after.update(names(2)[:1], [], WAIT_S).policy_version == 2


def test_an_update_with_nothing_left_makes_no_version_and_is_replayed_as_such(start, tmp_path):
    before = start(tmp_path)
    before.publish()
    old = groups_of(before, 9, version=0)
    push(before, old)
    train(before, 1, 2)
    report = before.update(names(9), [], WAIT_S)
    assert report.policy_version == 2 and report.digest == before.digest(2, WAIT_S)
    assert report.outcomes == dict.fromkeys(names(9), "dropped_stale")
    push(before, groups_of(before, 8, version=2))
    assert before.update([], names(8), WAIT_S).policy_version == 2
    train(before, 3)
    after = start(tmp_path)
    restored = after.restore()
    assert [update.policy_version for update in restored.replay] == [1, 2, 3, 3, 3]
    assert [update.dropped_ids for update in restored.replay] == [[], [], [], names(8), []]
    assert restored.waiting == []
    made = [(1, "equal"), (2, "equal"), (2, None), (2, None), (3, "equal")]
    assert replayed(after, restored) == made


def test_a_full_disk_during_a_save_leaves_checkpoint_and_spool_C02(start, tmp_path, digests):
    points = tmp_path / "points"
    learner = start(tmp_path, keep_checkpoints=1)
    failpoints.install(str(points))
    learner.publish()
    train(learner, 1)
    learner.save(1, RUN_STATE)
    train(learner, 2)
    failpoints.arm(points, "learner.checkpoint", "enospc")
    (failed,) = learner.save(2, RUN_STATE)
    assert re.search("checkpoint of step 2 .*No space left", failed.problem)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert train(learner, 3) == [digests[3]]

    after = start(tmp_path)
    restored = after.restore()
    assert restored.step == 1
    assert replayed(after, restored) == [(2, "equal"), (3, "equal")]


def test_a_full_disk_refuses_groups_and_updates_and_is_the_problem(start, tmp_path, monkeypatch):
    learner = start(tmp_path)
    learner.publish()
    groups = groups_of(learner, 1)
    spool = learner._journal._spool
    push(learner, groups[:1])
    assert learner.problem == ""
    with monkeypatch.context() as patched:
        patched.setattr("learner.durable.spool.os.fdatasync", disk_full)
        with pytest.raises(NotStored, match="'g1-1' is not accepted: .*No space left"):
            push(learner, groups[1:])
        assert "No space left" in learner.problem
        with pytest.raises(SpoolFailed, match="No space left"):
            learner.update(names(1)[:1], [], WAIT_S)
    assert learner.buffer.counts().accepted == 1
    assert push(learner, groups[1:]) == [PushOutcome.ACCEPTED]
    assert learner.problem == ""
    assert list(spool.read(0).groups) == names(1)
    assert learner.update(names(1), [], WAIT_S).policy_version == 1


def disk_full(_):
    raise OSError(28, "No space left on device")


def test_a_state_other_than_the_saved_one_is_refused_and_its_component_named(
    start, tmp_path, monkeypatch
):
    learner = start(tmp_path)
    learner.publish()
    train(learner, 1)
    learner.save(1, RUN_STATE)
    after = start(tmp_path)
    resume = after._core.resume

    def other(state, *, policy_version):
        params = jax.tree.map(lambda leaf: leaf + 1e-7, state.params)
        resume(dataclasses.replace(state, params=params), policy_version=policy_version)

    monkeypatch.setattr(after._core, "resume", other)
    with pytest.raises(CertificateMismatch, match="step 1 does not keep .*: weights differs"):
        after.restore()
    reseeded = start(tmp_path, seed=1)
    with pytest.raises(CertificateMismatch, match="data_order, keys differ from what was saved"):
        reseeded.restore()


def test_a_group_that_cannot_train_is_set_aside_when_it_is_restored_R11(
    start, tmp_path, monkeypatch
):
    monkeypatch.setattr(group_buffer, "check_group", lambda group, rules: None)  # as it once was
    first = start(tmp_path)
    first.publish()
    poisoned, good = groups_of(first, 1)
    ids = np.full_like(poisoned.completions[0].token_ids, 10**6)
    bad = dataclasses.replace(poisoned.completions[0], token_ids=ids)
    poisoned = dataclasses.replace(poisoned, completions=(bad, *poisoned.completions[1:]))
    waiting = dataclasses.replace(poisoned, group_id="waits")
    push(first, [poisoned, good, waiting])
    with pytest.raises(ValueError, match="token ids lie in"):
        first.update(names(1), [], WAIT_S)
    monkeypatch.undo()

    again = start(tmp_path)
    restored = again.restore()
    assert restored is not None and restored.waiting == []
    assert [re.search("group (.*?):", reason)[1] for reason in restored.set_aside] == [
        poisoned.group_id,
        "waits",
    ]
    kept = (tmp_path / "rejected" / "unfit.jsonl").read_text().splitlines()
    assert [json.loads(line)["group_id"] for line in kept] == [poisoned.group_id, "waits"]
    again.publish()
    report = again.update(names(1), [], WAIT_S)
    assert report.outcomes.pop(poisoned.group_id) == "dropped_error"
    assert set(report.outcomes) == {good.group_id} and report.policy_version == 1
    assert again.buffer.put_duplicate("run", poisoned.group_id)
    push(again, [dataclasses.replace(groups_of(again, 2)[0], group_id="waits")])
    assert again.update(["waits"], [], WAIT_S).outcomes == {"waits": "trained"}, "it is made anew"
    again.save(1, RUN_STATE)

    restored = start(tmp_path).restore()
    assert restored is not None and not restored.set_aside and not restored.replay


def test_segments_go_with_the_checkpoints_that_need_them(start, tmp_path):
    learner = start(tmp_path)
    learner.publish()
    for step in (1, 2, 3):
        train(learner, step)
        learner.save(step, RUN_STATE)
    assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == [
        "step-00000002.bin",
        "step-00000003.bin",
    ]
