"""Checkpoints on disk, from which a run resumes bit for bit.

One folder per step, written under another name and renamed when it is complete:

    step-00000020/state/            weights and optimiser, by Orbax, sharded as they lie
    step-00000020/record/           what the caller stores: versions, cursors, seeds (JSON)
    step-00000020/certificate.json  hashes of what a resume must restore exactly (certificate.py)
    step-00000020/manifest.json     name, size and sha256 of every other file, the tree's shapes

A folder is complete when every file of its manifest is there, unchanged. Older checkpoints go
only after the new one has been read back and found complete.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from learner.durable.certificate import Certificate
from learner.update.state import TrainState
from services.process import failpoints
from services.process.whole_file import sync_folder, write_whole

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CERTIFICATE = "certificate.json"
_STEP = re.compile(r"step-(\d{8})")
_WRITING = ".writing"
_REPLACED = ".replaced"
_HASHING_THREADS = 4
_NO_SPACE = "No space left on device"
"""In the message of storage libraries that do not raise OSError on a full disk."""


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


class DamagedCheckpoint(ValueError):
    """A folder is not a complete checkpoint; the message says which file and why."""


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

    def save(
        self,
        step: int,
        state: TrainState,
        record: dict[str, Any],
        certificate: Certificate | None = None,
    ) -> pathlib.Path:
        """Writes a checkpoint, reads it back, and only then drops older ones.

        Args:
            step: names it; one that exists is replaced.
            state: on the devices; not changed.
            record: JSON values.
            certificate: of state and record.

        Returns:
            The folder.

        Raises:
            CheckpointFailed: if it cannot be written, as on a full disk; earlier checkpoints are
                untouched, and what was written of this one is gone.
            DamagedCheckpoint: if it does not read back as it was written.
        """
        final = self._folder / f"step-{step:08d}"
        writing = final.with_name(final.name + _WRITING)
        with _raising_checkpoint_failed(step, writing):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            self._write(writing, step, state, record, certificate)
            verify_checkpoint(writing)
            self._put_in_place(writing, final)
        self._prune(step)
        return final

    def _write(
        self,
        writing: pathlib.Path,
        step: int,
        state: TrainState,
        record: dict[str, Any],
        certificate: Certificate | None,
    ) -> None:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(
                writing,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_as_dict(state)),
                    record=ocp.args.JsonSave(record),
                ),
            )
        failpoints.reach("learner.checkpoint", writing)
        if certificate is not None:
            (writing / CERTIFICATE).write_text(json.dumps(certificate.plain(), indent=1))
        _write_manifest(writing, step, state)

    def _put_in_place(self, writing: pathlib.Path, final: pathlib.Path) -> None:
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():
            final.rename(replaced)
        writing.rename(final)
        sync_folder(self._folder)
        if replaced.exists():
            shutil.rmtree(replaced)

    def _prune(self, newest: int) -> None:
        """Keeps the newest checkpoint and those before it, `keep` in all.

        A later step is one that a resume skipped: the run has continued from an earlier one.
        """
        for later in [step for step in self._steps() if step > newest]:
            log.warning("removing checkpoint step-%08d: the run went on from an earlier one", later)
            _remove(self._folder / f"step-{later:08d}")
        for old in self.complete_steps()[self._keep :]:
            _remove(self._folder / f"step-{old:08d}")

    def restore(
        self, abstract_state: TrainState, *, only_step: int | None = None
    ) -> RestoredCheckpoint | None:
        """Reads the newest complete checkpoint; None where there is none at all.

        Args:
            abstract_state: shape, dtype and sharding of every leaf; the mesh that saved does not
                matter.
            only_step: reads that one instead of the newest.

        Raises:
            ValueError: if a complete checkpoint holds another model or optimiser.
            NoCompleteCheckpoint: if there are folders but none is complete: a fresh start would
                hide the loss.
        """
        if not self._folder.is_dir():
            return None
        self._recover_replaced()
        skipped = [
            f"{path.name}: was not finished"
            for path in sorted(self._folder.iterdir())
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
        return [s for s in self._steps() if (self._folder / f"step-{s:08d}" / MANIFEST).is_file()]

    def _steps(self) -> list[int]:
        names = [path.name for path in self._folder.iterdir()]
        return sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)

    def _recover_replaced(self) -> None:
        """Undoes a replacement that was interrupted between its two renames."""
        for path in self._folder.glob(f"step-*{_REPLACED}"):
            final = path.with_name(path.name.removesuffix(_REPLACED))
            if not final.exists():
                path.rename(final)

    def _clean(self) -> None:
        """Removes what an interrupted save left."""
        self._recover_replaced()
        for path in self._folder.iterdir():
            if path.name.startswith("step-") and not _STEP.fullmatch(path.name):
                log.warning("removing unfinished checkpoint %s", path.name)
                _remove(path)


@contextlib.contextmanager
def _raising_checkpoint_failed(step: int, writing: pathlib.Path):
    """Turns what a storage library raises where it cannot write into CheckpointFailed."""
    try:
        yield
    except DamagedCheckpoint:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        number = error.errno if isinstance(error, OSError) else errno.ENOSPC
        if not isinstance(error, OSError) and _NO_SPACE not in str(error):
            raise
        for remains in writing.parent.glob(f"{writing.name}*"):  # Orbax writes beside it first
            with contextlib.suppress(OSError):
                _remove(remains)
        reason = os.strerror(number) if number else str(error)
        raise CheckpointFailed(
            number, f"the checkpoint of step {step} could not be written to {writing}: {reason}"
        ) from error


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """The caller's record in a checkpoint, without reading arrays.

    Raises:
        DamagedCheckpoint: as `verify_checkpoint`.
    """
    verify_checkpoint(folder)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            folder, args=ocp.args.Composite(record=ocp.args.JsonRestore())
        )
    return restored["record"]


def _read_certificate(folder: pathlib.Path) -> dict[str, str] | None:
    path = folder / CERTIFICATE
    return json.loads(path.read_text()) if path.is_file() else None


def verify_checkpoint(folder: pathlib.Path) -> dict[str, Any]:
    """Reads every file of a checkpoint against its manifest, and returns the manifest.

    Raises:
        DamagedCheckpoint: naming the folder, the file and what is wrong with it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder.name}: {MANIFEST} is missing") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{folder.name}: {MANIFEST} is not JSON ({error})") from None
    if not isinstance(manifest, dict) or not {"files", "tree"} <= manifest.keys():
        raise DamagedCheckpoint(f"{folder.name}: {MANIFEST} has no files or no tree in it")
    for name, written in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{folder.name}: {name} is missing")
        if path.stat().st_size != written["bytes"]:
            raise DamagedCheckpoint(
                f"{folder.name}: {name} has {path.stat().st_size} bytes, not {written['bytes']}"
            )
    for name, digest in _digests(folder, list(manifest["files"])).items():
        if digest != manifest["files"][name]["sha256"]:
            raise DamagedCheckpoint(f"{folder.name}: {name} has another sha256 than when written")
    return manifest


def _as_dict(state: TrainState) -> dict[str, Any]:
    """The state as Orbax names it on disk."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


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
            f"{folder.name} holds another model or optimiser than the config asks for: "
            f"{len(different)} leaves differ, such as {name}: stored {stored.get(name)}, "
            f"wanted {tree.get(name)}; resume with the same model.path and learner.optimizer.name"
        )


def _write_manifest(folder: pathlib.Path, step: int, state: TrainState) -> None:
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    digests = _digests(folder, names, sync=True)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digests[name]} for name in names
    }
    content = {"step": step, "files": files, "tree": _tree_of(state)}
    write_whole(folder / MANIFEST, json.dumps(content, indent=1), sync=True)
    sync_folder(folder)


def _digests(folder: pathlib.Path, names: list[str], *, sync: bool = False) -> dict[str, str]:
    """sha256 of each file, several at once: hashing leaves the interpreter free."""

    def digest(name):
        with open(folder / name, "rb") as file:
            if sync:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _remove(path: pathlib.Path) -> None:
    """Deletes a checkpoint, its manifest first: if interrupted, it does not look complete."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (path / MANIFEST).unlink()
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
