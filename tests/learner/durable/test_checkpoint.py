"""Checkpoints: complete or not taken, on any device count, older ones only after newer ones."""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from learner.config import OptimizerConfig
from learner.durable import checkpoint
from learner.durable.certificate import CertificateMismatch, check_certificate, make_certificate
from learner.durable.checkpoint import (
    CheckpointFailed,
    CheckpointFolder,
    DamagedCheckpoint,
    verify_checkpoint,
)
from learner.update.mesh import make_mesh
from learner.update.optimizer import learning_rate_schedule, make_optimizer
from learner.update.sharding import param_specs
from learner.update.state import abstract_state, init_state
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow

PARAMS = {
    "embed_tokens": {"weight": np.arange(32, dtype=np.float32).reshape(8, 4)},
    "norm": {"weight": np.ones(4, np.float32)},
}
RECORD = {"policy_version": 3, "cursor": {"epoch": 1, "position": 6}, "seed": 7, "ledger": [1.5]}


def place(*, data=1, fsdp=1, params=PARAMS, name="adamw"):
    """(state, abstract state) of these parameters on a mesh."""
    mesh = make_mesh(data=data, fsdp=fsdp, devices=jax.devices()[: data * fsdp])
    specs = param_specs(params, fsdp)
    config = OptimizerConfig(name=name, schedule="cosine", warmup_steps=2)
    optimizer = make_optimizer(config, learning_rate_schedule(config, 10))
    return (
        init_state(params, optimizer, mesh, specs),
        abstract_state(params, optimizer, mesh, specs),
    )


def shifted(value):
    return jax.tree.map(lambda leaf: leaf + value, PARAMS)


def first_weight(restored):
    return float(restored.state.params["embed_tokens"]["weight"][0, 0])


@pytest.fixture
def two(tmp_path):
    """A folder that keeps two, with steps 1 and 2, whose weights start at 1 and 2."""
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2):
        folder.save(step, place(params=shifted(step))[0], {**RECORD, "policy_version": step})
    return folder, tmp_path


def test_state_and_record_come_back_on_other_devices_C05(tmp_path):
    state, _ = place(data=2, fsdp=4)
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(5, state, RECORD)
    for shape in (dict(fsdp=4), dict(data=1), dict(data=4, fsdp=2)):
        _, wanted = place(**shape)
        restored = folder.restore(wanted)
        assert (restored.step, restored.record, restored.skipped) == (5, RECORD, [])
        jax.tree.map(
            lambda new, old, want: (
                np.testing.assert_array_equal(np.array(new), np.array(old)),
                np.testing.assert_equal(new.sharding == want.sharding, True),
            ),
            restored.state,
            state,
            wanted,
        )


def test_no_folder_means_no_checkpoint(tmp_path):
    assert CheckpointFolder(tmp_path / "none", keep=1).restore(place()[1]) is None
    assert CheckpointFolder(tmp_path, keep=1).restore(place()[1]) is None


def files_of(folder: pathlib.Path):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_any_missing_file_is_noticed_C01(two):
    _, path = two
    newest = path / "step-00000002"
    verify_checkpoint(newest)
    for name in files_of(newest):
        held = (newest / name).read_bytes()
        (newest / name).unlink()
        with pytest.raises(DamagedCheckpoint, match=f"step-00000002: .*{pathlib.Path(name).name}"):
            verify_checkpoint(newest)
        (newest / name).write_bytes(held)
    verify_checkpoint(newest)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damaged_newest_is_skipped_and_named_C01(two, damage):
    folder, path = two
    newest = path / "step-00000002"
    name = max(files_of(newest / "state"), key=lambda n: (newest / "state" / n).stat().st_size)
    victim = newest / "state" / name
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "cut":
        victim.write_bytes(content[:-1])
    else:
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    restored = folder.restore(place()[1])
    assert restored.step == 1 and first_weight(restored) == 1
    [reason] = restored.skipped
    assert reason.startswith("step-00000002: state/")

    folder.save(2, place(params=shifted(20))[0], RECORD)
    again = folder.restore(place()[1])
    assert again.step == 2 and first_weight(again) == 20 and again.skipped == []


def test_unfinished_folder_is_skipped_and_swept_by_the_next_save_C01(two):
    folder, path = two
    (path / "step-00000003.writing").mkdir()
    (path / "step-00000003.writing" / "half").write_text("x")
    restored = folder.restore(place()[1])
    assert restored.step == 2
    assert restored.skipped == ["step-00000003.writing: was not finished"]
    folder.save(3, place(params=shifted(3))[0], RECORD)
    assert sorted(p.name for p in path.iterdir()) == ["step-00000002", "step-00000003"]


def test_replacement_cut_between_its_renames_is_undone(two):
    folder, path = two
    (path / "step-00000002").rename(path / "step-00000002.replaced")
    restored = folder.restore(place()[1])
    assert restored.step == 2 and restored.skipped == []


def test_only_damaged_checkpoints_never_mean_a_fresh_start(two):
    folder, path = two
    for step in (1, 2):
        (path / f"step-0000000{step}" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no complete checkpoint .*step-00000002.*step-00000001"):
        folder.restore(place()[1])


@pytest.mark.parametrize(
    "raised, number",
    [
        (OSError(28, "No space left on device"), 28),
        (ValueError("RESOURCE_EXHAUSTED: Failed to write 52: No space left on device [28]"), 28),
        (OSError(errno.EROFS, "Read-only file system"), errno.EROFS),
        (ValueError("Failed to write 52 bytes: Disk quota exceeded [122]"), errno.EDQUOT),
        (RuntimeError("INTERNAL: Error fsyncing: Input/output error [5]"), errno.EIO),
        (OSError("no errno at all"), errno.EIO),
    ],
)
def test_a_disk_that_cannot_be_written_is_a_failed_checkpoint(two, monkeypatch, raised, number):
    """ValueError and RuntimeError are how the storage library of Orbax reports one."""
    folder, path = two

    def disk_full(self, directory, *args, **kwargs):
        part = pathlib.Path(f"{directory}.orbax-checkpoint-tmp")
        part.mkdir()
        (part / "half").write_text("x")
        raise raised

    monkeypatch.setattr(ocp.Checkpointer, "save", disk_full)
    reason = os.strerror(number)
    with pytest.raises(CheckpointFailed, match=f"checkpoint of step 3 .*{reason}") as failure:
        folder.save(3, place()[0], RECORD)
    assert failure.value.errno == number
    assert sorted(p.name for p in path.iterdir()) == ["step-00000001", "step-00000002"]


def test_another_error_of_a_library_keeps_its_name(two, monkeypatch):
    monkeypatch.setattr(ocp.Checkpointer, "save", lambda *_, **__: int("seven"))
    with pytest.raises(ValueError, match="invalid literal"):
        two[0].save(3, place()[0], RECORD)


def test_a_certificate_is_kept_covered_and_given_back(tmp_path):
    state, _ = place(data=2, fsdp=4)
    run_state = {"book": {"cursor": 6, "unfinished": [[4, 1]]}, "rewards": [0.5, None]}
    certificate = make_certificate(state, seed=7, driver_state=run_state)
    folder = CheckpointFolder(tmp_path, keep=1)
    saved = folder.save(5, state, RECORD, certificate).folder
    restored = folder.restore(place()[1])  # on one device
    again = make_certificate(restored.state, seed=7, driver_state=json.loads(json.dumps(run_state)))
    check_certificate(restored.certificate, again, "the checkpoint of step 5")
    (saved / "certificate.json").write_text(json.dumps({**certificate.plain(), "keys": "0" * 64}))
    with pytest.raises(DamagedCheckpoint, match="certificate.json has"):
        verify_checkpoint(saved)


@pytest.mark.parametrize(
    "part, change",
    [
        ("weights", dict(params=lambda leaf: leaf.at[0].add(1e-7))),
        ("optimizer", dict(opt_state=lambda leaf: leaf + 1)),
        ("optimizer", dict(update_count=lambda leaf: leaf + 1)),
        ("data_order, ledger", dict(run_state={"book": {"cursor": 7, "unfinished": [[4, 1]]}})),
        ("data_order, ledger", dict(run_state={"book": {"cursor": 6, "unfinished": [[4, 2]]}})),
        ("ledger", dict(run_state={"book": {"cursor": 6, "unfinished": [[4, 1]]}, "rewards": [1]})),
        ("data_order, keys", dict(seed=8)),
    ],
)
def test_a_certificate_names_the_component_that_differs(part, change):
    state, _ = place()
    run_state = change.pop("run_state", None)
    seed = change.pop("seed", 7)
    given = {"book": {"cursor": 6, "unfinished": [[4, 1]]}}
    stored = make_certificate(state, seed=7, driver_state=given).plain()
    changed = {
        name: jax.tree.map(function, getattr(state, name)) for name, function in change.items()
    }
    now = make_certificate(
        dataclasses.replace(state, **changed), seed=seed, driver_state=run_state or given
    )
    with pytest.raises(CertificateMismatch, match=f"resume certificate: {part} differ"):
        check_certificate(stored, now, "the checkpoint of step 1")


def test_first_checkpoint_outlives_a_failed_second_save_C02(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(1, place(params=shifted(1))[0], RECORD)

    def disk_full(self, directory, *args, **kwargs):
        pathlib.Path(directory).mkdir()
        (pathlib.Path(directory) / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ocp.Checkpointer, "save", disk_full)
        with pytest.raises(OSError, match="No space left"):
            folder.save(2, place(params=shifted(2))[0], RECORD)
    assert folder.complete_steps() == [1]

    def unreadable(path):
        raise DamagedCheckpoint(f"{path.name}: state/x has another sha256 than when written")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "verify_checkpoint", unreadable)
        with pytest.raises(CheckpointFailed, match="state/x has another sha256"):
            folder.save(2, place(params=shifted(2))[0], RECORD)
    assert first_weight(folder.restore(place()[1])) == 1
    folder.save(2, place(params=shifted(2))[0], RECORD)
    assert folder.complete_steps() == [2]


def test_kill_during_a_save_leaves_the_one_before_C01_C02(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        import jax
        import numpy as np
        import optax
        from learner.durable.checkpoint import CheckpointFolder
        from learner.update.mesh import make_mesh
        from learner.update.sharding import param_specs
        from learner.update.state import init_state

        mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
        noise = np.random.default_rng(0).normal(size=(4096, 4096)).astype(np.float32)
        params = {"embed_tokens": {"weight": noise}}
        state = init_state(params, optax.sgd(0.1), mesh, param_specs(params, 1))
        folder = CheckpointFolder(sys.argv[1], keep=1)
        for step in range(1, 1000):
            folder.save(step, state, {"policy_version": step})
            print("saved", flush=True)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
    )
    try:
        assert child.stdout.readline() == b"saved\n", "the child died before its first save"
        deadline = time.monotonic() + HANG_S
        while not list(tmp_path.glob("*.writing*")):
            assert time.monotonic() < deadline, "the child never began another save"
            time.sleep(0.001)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(HANG_S)
    folder = CheckpointFolder(tmp_path, keep=1)
    steps = folder.complete_steps()
    assert steps
    for step in steps:
        verify_checkpoint(tmp_path / f"step-{step:08d}")


def test_a_save_outlives_later_checkpoints_that_a_resume_passed_over_C01_C02(tmp_path):
    """Step 30 is damaged, the run resumes at 20 and saves 25: that one must stay."""
    folder = CheckpointFolder(tmp_path, keep=1)
    state, abstract = place(params=shifted(25))
    for step in (20, 30):
        CheckpointFolder(tmp_path, keep=2).save(step, state, RECORD)
    next((tmp_path / "step-00000030" / "record").glob("*")).write_text("{")
    assert folder.save(25, state, RECORD).folder.is_dir()
    restored = folder.restore(abstract)
    assert restored is not None and restored.step == 25
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000025"]


def test_a_link_among_the_old_checkpoints_goes_and_what_it_names_stays_R06(two, tmp_path):
    folder, path = two
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    (path / "step-00000001").rename(elsewhere)
    (path / "step-00000001").symlink_to(elsewhere)
    (path / "step-00000000.writing").symlink_to(elsewhere)
    saved = folder.save(3, place(params=shifted(3))[0], RECORD)
    assert (saved.oldest_step, saved.not_removed) == (2, ())
    assert sorted(p.name for p in path.iterdir()) == ["step-00000002", "step-00000003"]
    verify_checkpoint(elsewhere)


def test_a_link_in_place_of_the_checkpoint_that_is_saved_again_is_replaced_R06(two, tmp_path):
    folder, path = two
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    (path / "step-00000002").rename(elsewhere)
    (path / "step-00000002").symlink_to(elsewhere)
    folder.save(2, place(params=shifted(9))[0], RECORD)
    assert first_weight(folder.restore(place()[1])) == 9
    assert not (path / "step-00000002").is_symlink()
    verify_checkpoint(elsewhere)


@pytest.mark.parametrize("stuck", ["a mount point", "a file in use", "an unfinished one"])
def test_what_cannot_be_removed_is_reported_once_and_fails_no_save_R06(two, monkeypatch, stuck):
    folder, path = two
    rename, rmtree = pathlib.Path.rename, shutil.rmtree

    def busy(self):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))

    if stuck == "a mount point":
        monkeypatch.setattr(
            pathlib.Path,
            "rename",
            lambda self, to: busy(self) if self.name == "step-00000001" else rename(self, to),
        )
    elif stuck == "an unfinished one":
        (path / "step-00000009.writing").mkdir()
    names = {"an unfinished one": "step-00000009", "a file in use": "step-00000001"}
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda gone, *a, **k: (
            busy(gone) if names.get(stuck, "none") in str(gone) else rmtree(gone, *a, **k)
        ),
    )
    saved = folder.save(3, place(params=shifted(3))[0], RECORD)
    [why] = saved.not_removed
    assert "Device or resource busy" in why and saved.oldest_step == 2
    assert first_weight(folder.restore(place()[1])) == 3
    again = folder.save(4, place(params=shifted(4))[0], RECORD)
    assert (again.not_removed, again.oldest_step) == ((), 3)
    if stuck == "a mount point":
        verify_checkpoint(path / "step-00000001")


def test_the_best_of_those_that_go_stays_apart_until_a_better_one_or_none_is_older(tmp_path):
    folder, scores = CheckpointFolder(tmp_path, keep=2), {}
    found = {}
    for step, score in enumerate((0.1, 0.7, 0.4, 0.2, 0.7, 0.9, 0.3, 0.2), 1):
        scores[step] = score
        saved = folder.save(step, place(params=shifted(step))[0], RECORD, None, scores)
        best = [p.name[-1] for p in (tmp_path / "best").glob("*")]
        found[step] = [p.name[-1] for p in sorted(tmp_path.glob("step-*"))], best
        assert saved.oldest_step == max(1, step - 1)  # the best one is not for a resume
    assert found == {
        1: (["1"], []),
        2: (["1", "2"], []),
        3: (["2", "3"], []),
        4: (["3", "4"], ["2"]),
        5: (["4", "5"], []),  # the newer of equals
        6: (["5", "6"], []),
        7: (["6", "7"], []),
        8: (["7", "8"], ["6"]),
    }
    verify_checkpoint(tmp_path / "best" / "step-00000006")
    assert folder.restore(place()[1]).step == 8


def test_a_checkpoint_whose_evaluation_is_under_way_stays_beside_the_best(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    best = lambda: sorted(p.name[-1] for p in (tmp_path / "best").iterdir())
    for step in (1, 2, 3, 4):
        folder.save(step, place()[0], RECORD, None, {1: 0.5} | ({2: None} if step > 1 else {}))
    assert best() == ["1", "2"]
    folder.save(5, place()[0], RECORD, None, {1: 0.5, 2: 0.6})
    assert best() == ["2"]


def test_a_resume_never_takes_the_best_one_and_forgets_one_that_is_later(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (4, 5):
        folder.save(step, place()[0], RECORD, None, {4: 1.0})
    assert [p.name for p in (tmp_path / "best").iterdir()] == ["step-00000004"]
    shutil.rmtree(tmp_path / "step-00000005")
    assert folder.restore(place()[1]) is None
    folder.save(3, place()[0], RECORD, None, {3: 0.1, 4: 1.0})
    assert not [*(tmp_path / "best").iterdir()]


def test_where_the_best_one_cannot_be_moved_it_stays_and_the_save_says_so(two, monkeypatch):
    folder, path = two
    (path / "best").write_text("no folder")
    saved = folder.save(3, place()[0], RECORD, None, {1: 1.0})
    [why] = saved.not_removed
    assert why.startswith("step-00000001 cannot be kept in") and (path / "step-00000001").is_dir()
    assert saved.oldest_step == 2


def test_where_old_checkpoints_cannot_be_listed_nothing_is_said_of_the_oldest_R06(two, monkeypatch):
    """What is recorded since the oldest checkpoint must stay while it may be needed."""
    folder, path = two

    def unlisted():
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(folder, "_steps", unlisted)
    saved = folder.save(3, place(params=shifted(3))[0], RECORD)
    assert saved.oldest_step is None and "could not be removed" in saved.not_removed[0]
    monkeypatch.undo()
    assert folder.complete_steps() == [3, 2, 1]


def test_every_folder_of_a_checkpoint_is_synced_with_its_files(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def recorded(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints", keep=1)
    folder.save(1, place()[0], RECORD)
    unsynced = [
        str(path) for path in (tmp_path, *tmp_path.rglob("*")) if path.stat().st_ino not in synced
    ]
    assert unsynced == []


@pytest.mark.parametrize("change", ["renamed", "flipped", "cut", "folder", "unreadable"])
def test_a_damaged_manifest_of_the_newest_passes_over_to_the_one_before_R07(
    two, monkeypatch, change
):
    folder, path = two
    manifest = path / "step-00000002" / "manifest.json"
    content = manifest.read_bytes()
    if change == "renamed":
        manifest.write_bytes(content.replace(b'"sha256"', b'"sha257"', 1))
    elif change == "flipped":
        at = content.index(b"tree") + 20
        manifest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif change == "cut":
        manifest.write_bytes(content[: len(content) // 2])
    elif change == "folder":
        manifest.unlink()
        manifest.mkdir()
    else:
        read = pathlib.Path.read_bytes
        monkeypatch.setattr(
            pathlib.Path,
            "read_bytes",
            lambda self: unreadable() if self == manifest else read(self),
        )

        def unreadable():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(manifest))

    restored = folder.restore(place()[1])
    assert restored.step == 1 and first_weight(restored) == 1
    [reason] = restored.skipped
    assert reason.startswith("step-00000002: ") and "manifest.json" in reason


def test_a_checkpoint_of_a_program_without_checksums_is_restored(two):
    folder, path = two
    manifest = path / "step-00000002" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["checksum"]
    manifest.write_text(json.dumps(content))
    assert folder.restore(place()[1]).step == 2
    name = next(iter(content["files"]))
    for wrong in (None, {}, {"bytes": 1}, 7):
        manifest.write_text(json.dumps({**content, "files": {name: wrong}}))
        assert folder.restore(place()[1]).step == 1


def test_keep_counts_complete_checkpoints(two):
    folder, path = two
    (path / "step-00000002" / "manifest.json").unlink()
    folder.save(3, place()[0], RECORD)
    assert folder.complete_steps() == [3, 1]
    folder.save(4, place()[0], RECORD)
    assert folder.complete_steps() == [4, 3]


@pytest.mark.parametrize(
    "change, leaf",
    [
        (dict(name="sgd"), "opt_state"),
        (dict(params={**PARAMS, "norm": {"weight": np.ones(5, np.float32)}}), "norm"),
    ],
)
def test_another_model_or_optimiser_is_refused_with_the_leaf(two, change, leaf):
    with pytest.raises(ValueError, match=f"step-00000002 holds another model.*{leaf}"):
        two[0].restore(place(**change)[1])


def test_keep_must_leave_one():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        CheckpointFolder("unused", keep=0)
