"""Checkpoints on disk, from which a run resumes bit for bit.

One folder per step, written under another name and renamed when it is complete:

    step-00000020/state/            weights and optimiser, by Orbax (state_files.py)
    step-00000020/record/           what the caller stores: versions, cursors, seeds (JSON)
    step-00000020/certificate.json  hashes of what a resume must restore exactly (certificate.py)
    step-00000020/manifest.json     what the folder must hold (checkpoint_manifest.py)

A folder is complete when every file of its manifest is there, unchanged. Older checkpoints go
only after the new one has been read back and found complete; one that cannot be removed stays, and
the save reports it. Of those that go, the best one is moved to `best/`: it is for an export
(`stored_policy.py`), and a run never resumes from it.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from learner.durable.certificate import Certificate
from learner.durable.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpoint,
    verify_checkpoint,
    write_manifest,
)
from learner.durable.state_files import write_state
from learner.update.state import TrainState
from services.process import failpoints
from services.process.whole_file import make_folder, sync_folder

log = logging.getLogger(__name__)

CERTIFICATE = "certificate.json"
BEST = "best"
"""Folder with the best of the checkpoints that are no longer kept for a resume."""
_STEP = re.compile(r"step-(\d{8})")
_WRITING = ".writing"
_REPLACED = ".replaced"
_REMOVED = ".removed"
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES)
"""Found by their text in the message of storage libraries that do not raise OSError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was written and read back."""

    folder: pathlib.Path
    oldest_step: int | None
    """Of the oldest checkpoint that is to be kept; None where that could not be found out."""
    not_removed: tuple[str, ...]
    """What should be gone and could not be removed, each with the reason, and only once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
    """A complete checkpoint, on the devices."""

    step: int
    state: TrainState
    record: dict[str, Any]
    certificate: dict[str, str] | None
    """As it was stored; None in a checkpoint that has none."""
    skipped: list[str]
    """Newer folders that were skipped, each with the reason."""


class NoCompleteCheckpoint(ValueError):
    """There are folders of checkpoints, and none is complete."""

    def __init__(self, message: str, skipped: list[str]):
        super().__init__(message, skipped)
        self.skipped = skipped

    def __str__(self) -> str:
        return self.args[0]


class CheckpointFailed(OSError):
    """A checkpoint could not be written; those before it are untouched."""


class CheckpointFolder:
    """Owns one folder of checkpoints. Only one process may write to it."""

    def __init__(self, folder: str | os.PathLike, *, keep: int):
        """Args:
        folder: made on the first save.
        keep: complete checkpoints that remain after a save, at least 1.
        """
        if keep < 1:
            raise ValueError(f"checkpoint.keep must be at least 1, got {keep}")
        self._folder = pathlib.Path(folder).absolute()
        self._keep = keep
        self._stuck: set[str] = set()
        """Names of what could not be removed."""
        self._unreported: list[str] = []
        """Why, of those that no save has returned."""

    def save(
        self,
        step: int,
        state: TrainState,
        record: dict[str, Any],
        certificate: Certificate | None = None,
        scores: Mapping[int, float | None] | None = None,
    ) -> SavedCheckpoint:
        """Writes a checkpoint, reads it back, and only then drops older ones.

        Args:
            step: names it; one that exists is replaced.
            state: on the devices, or numpy arrays on the host; not changed.
            record: JSON values.
            certificate: of state and record.
            scores: by step, higher is better: of the steps with one, the best checkpoint stays, and
                those whose score is not known yet.

        Raises:
            CheckpointFailed: if it cannot be written, as on a full disk, or does not read back as
                it was written; earlier checkpoints are untouched, and what was written of this one
                is gone.
        """
        final = self._folder / f"step-{step:08d}"
        writing = final.with_name(final.name + _WRITING)
        with self._raising_checkpoint_failed(step, writing):
            make_folder(self._folder)
            self._clean(writing)
            self._write(writing, step, state, record, certificate)
            verify_checkpoint(writing)
            failpoints.reach("learner.complete", writing)
            self._put_in_place(writing, final)
        kept = self._prune(step, scores or {})
        not_removed, self._unreported = tuple(self._unreported), []
        return SavedCheckpoint(
            folder=final, oldest_step=min(kept, default=None), not_removed=not_removed
        )

    def _write(
        self,
        writing: pathlib.Path,
        step: int,
        state: TrainState,
        record: dict[str, Any],
        certificate: Certificate | None,
    ) -> None:
        write_state(writing, _as_dict(state), record)
        failpoints.reach("learner.checkpoint", writing)
        if certificate is not None:
            (writing / CERTIFICATE).write_text(json.dumps(certificate.plain(), indent=1))
        write_manifest(writing, step, _tree_of(state))

    def _put_in_place(self, writing: pathlib.Path, final: pathlib.Path) -> None:
        replaced = final.with_name(final.name + _REPLACED)
        if os.path.lexists(final):
            final.rename(replaced)
        writing.rename(final)
        sync_folder(self._folder)
        self._try_to_remove(replaced)

    def _prune(self, newest: int, scores: Mapping[int, float | None]) -> list[int]:
        """Keeps the newest checkpoint and those before it, `keep` in all; returns their steps.

        A later step is one that a resume skipped: the run has continued from an earlier one. What
        cannot be removed stays: the new checkpoint is good whatever becomes of the others.
        """
        try:
            failpoints.reach("learner.retention", self._folder)
            steps, complete = self._steps(), self.complete_steps()
            best = complete_steps(self._folder / BEST)
        except OSError as error:
            self._note_stuck(
                self._folder.name,
                f"old checkpoints in {self._folder} could not be removed: {error.strerror}",
            )
            return []
        for later in [step for step in steps if step > newest]:
            log.warning("removing checkpoint step-%08d: the run went on from an earlier one", later)
            self._try_to_remove(self._folder / f"step-{later:08d}")
        complete = [step for step in complete if step <= newest]
        apart = _best_of([step for step in {*complete, *best} if step <= newest], scores)
        for old in complete[self._keep :]:
            if old in apart:
                self._move_to_best(old)
            else:
                self._try_to_remove(self._folder / f"step-{old:08d}")
        names = {f"step-{step:08d}" for step in apart}
        for path in (self._folder / BEST).glob("step-*"):
            if path.name not in names:
                self._try_to_remove(path)
        return complete[: self._keep] or [newest]

    def _move_to_best(self, step: int) -> None:
        name = f"step-{step:08d}"
        final = self._folder / BEST / name
        self._try_to_remove(final)
        try:
            final.parent.mkdir(exist_ok=True)
            (self._folder / name).rename(final)
            sync_folder(final.parent)
        except OSError as error:
            self._note_stuck(name, f"{name} cannot be kept in {final.parent}: {error.strerror}")

    def _try_to_remove(self, path: pathlib.Path) -> None:
        """Removes a folder or link, if it is there; notes why where it cannot be removed."""
        try:
            if os.path.lexists(path):
                _remove(path)
        except OSError as error:
            name = path.name.removesuffix(_REMOVED)
            left = path if os.path.lexists(path) else path.with_name(name + _REMOVED)
            self._note_stuck(
                name, f"{left} cannot be removed: {error.strerror}; remove it yourself"
            )

    def _note_stuck(self, name: str, why: str) -> None:
        if name not in self._stuck:
            self._stuck.add(name)
            self._unreported.append(why)
            log.warning(why)

    def restore(
        self, abstract_state: TrainState, *, only_step: int | None = None
    ) -> RestoredCheckpoint | None:
        """Reads the newest complete checkpoint; None where there is none at all.

        Args:
            abstract_state: shape, dtype and sharding of every leaf; the mesh that saved does not
                matter.
            only_step: reads that one instead of the newest.

        Raises:
            ValueError: if a complete checkpoint holds another model, optimiser or critic.
            NoCompleteCheckpoint: if there are folders but none is complete: a fresh start would
                hide the loss.
        """
        if not self._folder.is_dir():
            return None
        self._recover_replaced()
        skipped = [
            f"{path.name}: was not finished"
            for path in sorted(self._folder.glob("step-*"))
            if not _STEP.fullmatch(path.name)
        ]
        for step in self._steps() if only_step is None else [only_step]:
            folder = self._folder / f"step-{step:08d}"
            try:
                manifest = verify_checkpoint(folder)
            except DamagedCheckpoint as reason:
                log.warning("skipping checkpoint %s", reason)
                skipped.append(str(reason))
                continue
            _check_tree(folder, manifest["tree"], abstract_state)
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(
                    folder,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(_as_dict(abstract_state)),
                        record=ocp.args.JsonRestore(),
                    ),
                )
            return RestoredCheckpoint(
                step=step,
                state=TrainState(**restored["state"]),
                record=restored["record"],
                certificate=_read_certificate(folder),
                skipped=skipped,
            )
        if skipped:
            raise NoCompleteCheckpoint(
                f"no complete checkpoint in {self._folder}: {'; '.join(skipped)}. Restore the "
                "files, or start without --resume in another run.output_dir",
                skipped,
            )
        return None

    def complete_steps(self) -> list[int]:
        """Steps whose folder has a manifest, newest first; contents are not read."""
        return complete_steps(self._folder)

    def _steps(self) -> list[int]:
        return _steps_in(self._folder)

    def _recover_replaced(self) -> None:
        """Undoes a replacement that was interrupted between its two renames."""
        for path in self._folder.glob(f"step-*{_REPLACED}"):
            final = path.with_name(path.name.removesuffix(_REPLACED))
            if not final.exists():
                path.rename(final)

    def _clean(self, writing: pathlib.Path) -> None:
        """Removes what an interrupted save left; raises OSError only where it is in the way."""
        self._recover_replaced()
        for path in list(self._folder.glob("step-*")):
            if _STEP.fullmatch(path.name):
                continue
            log.warning("removing unfinished checkpoint %s", path.name)
            if path.name.startswith(writing.name):
                _remove(path)
            else:
                self._try_to_remove(path)

    @contextlib.contextmanager
    def _raising_checkpoint_failed(self, step: int, writing: pathlib.Path):
        """Turns what is raised where files cannot be written into CheckpointFailed."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            number = _error_number(error)
            if number is None:
                raise
            with contextlib.suppress(OSError):
                for remains in writing.parent.glob(f"{writing.name}*"):  # Orbax's own among them
                    self._try_to_remove(remains)
                self._recover_replaced()
            reason = str(error) if isinstance(error, DamagedCheckpoint) else os.strerror(number)
            raise CheckpointFailed(
                number, f"the checkpoint of step {step} could not be written to {writing}: {reason}"
            ) from error


def _best_of(steps: Sequence[int], scores: Mapping[int, float | None]) -> set[int]:
    """The step with the best score, the newest of equals, and those whose score is to come."""
    known = {step: found for step in steps if (found := scores.get(step)) is not None}
    best = {max(known, key=lambda step: (known[step], step))} if known else set()
    return best | {step for step in steps if step in scores and step not in known}


def complete_steps(folder: pathlib.Path) -> list[int]:
    """Steps whose checkpoint has a manifest, newest first; none where there is no such folder.

    Only names are read: nothing is changed, and no file is checked.
    """
    if not folder.is_dir():
        return []
    return [s for s in _steps_in(folder) if (folder / f"step-{s:08d}" / MANIFEST).is_file()]


def _steps_in(folder: pathlib.Path) -> list[int]:
    names = [path.name for path in folder.iterdir()]
    return sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)


def _error_number(error: Exception) -> int | None:
    """The errno of what kept a file from being written; None for any other error."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, DamagedCheckpoint):
        return errno.EIO
    return next((number for number in _WRITE_ERRORS if os.strerror(number) in str(error)), None)


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """The caller's record in a checkpoint, without reading arrays.

    Raises:
        DamagedCheckpoint: as `verify_checkpoint`.
    """
    verify_checkpoint(folder)
    return read_verified_record(folder)


def read_verified_record(folder: pathlib.Path) -> dict[str, Any]:
    """The caller's record in a checkpoint whose files were found whole."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            folder, args=ocp.args.Composite(record=ocp.args.JsonRestore())
        )
    return restored["record"]


def _read_certificate(folder: pathlib.Path) -> dict[str, str] | None:
    path = folder / CERTIFICATE
    return json.loads(path.read_text()) if path.is_file() else None


def _as_dict(state: TrainState) -> dict[str, Any]:
    """The state as Orbax names it on disk, without what this run does not have."""
    named = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in named.items() if value is not None}


def _tree_of(state: TrainState) -> dict[str, list]:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): [str(leaf.dtype), *leaf.shape] for path, leaf in leaves}


def _check_tree(folder: pathlib.Path, stored: dict[str, list], wanted: TrainState) -> None:
    tree = _tree_of(wanted)
    different = sorted(
        name for name in stored.keys() | tree.keys() if stored.get(name) != tree.get(name)
    )
    if different:
        name = different[0]
        raise ValueError(
            f"{folder.name} holds another model, optimiser or critic than the config asks for: "
            f"{len(different)} leaves differ, such as {name}: stored {stored.get(name)}, "
            f"wanted {tree.get(name)}; resume with model.path, "
            "learner.optimizer.name and moments_dtype, learner.lora, algorithm.advantage and "
            "algorithm.entropy_target as they were"
        )


def _remove(path: pathlib.Path) -> None:
    """Deletes a folder; of a link only the link, never what it names.

    A checkpoint is renamed first: if interrupted, it does not look complete, and a mount point
    refuses before anything in it is gone.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if _STEP.fullmatch(path.name):
        path = path.rename(path.with_name(path.name + _REMOVED))
    shutil.rmtree(path)
