"""The manifest of a checkpoint: name, size and sha256 of every other file, and the tree's shapes.

It is written last and vouches for the folder, so it has a checksum itself. A manifest that was
written before there was one is read without.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from services.process.whole_file import sync_tree, write_whole

MANIFEST = "manifest.json"
_PARTS = {"step", "files", "tree"}
_CHECKSUM = "checksum"
"""Entry with the sha256 of the others."""
_HASHING_THREADS = 4


class DamagedCheckpoint(ValueError):
    """A folder is not a complete checkpoint; the message says which file and why."""


def write_manifest(folder: pathlib.Path, step: int, tree: Mapping[str, list]) -> None:
    """Writes the manifest of a folder; everything in the folder is on the disk on return.

    Args:
        folder: holds all other files.
        step: of the checkpoint.
        tree: dtype and shape of every leaf, by its path.
    """
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    digests = _digests(folder, names, sync=True)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digests[name]} for name in names
    }
    content = {"step": step, "files": files, "tree": dict(tree)}
    content[_CHECKSUM] = _checksum(content)
    write_whole(folder / MANIFEST, json.dumps(content, indent=1), sync=True)
    sync_tree(folder)


def verify_checkpoint(folder: pathlib.Path) -> dict[str, Any]:
    """Reads every file of a checkpoint against its manifest, and returns the manifest.

    Raises:
        DamagedCheckpoint: naming the folder, the file and what is wrong with it.
    """
    try:
        manifest = _read_manifest(folder)
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
                raise DamagedCheckpoint(
                    f"{folder.name}: {name} has another sha256 than when written"
                )
    except OSError as error:  # such as a sector of the disk that cannot be read
        raise DamagedCheckpoint(
            f"{folder.name}: {error.filename or folder} cannot be read: {error.strerror}"
        ) from error
    return manifest


def _read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder.name}: {MANIFEST} is missing") from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder.name}: {MANIFEST} is not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.keys() - {_CHECKSUM} != _PARTS:
        raise DamagedCheckpoint(f"{folder.name}: {MANIFEST} must have {sorted(_PARTS)} in it")
    checksum = manifest.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(manifest):
        raise DamagedCheckpoint(f"{folder.name}: {MANIFEST} does not match its checksum")
    if not _is_sound(manifest):
        raise DamagedCheckpoint(f"{folder.name}: {MANIFEST} is not as this program writes it")
    return manifest


def _is_sound(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest has what is read of it; one without a checksum may have anything."""
    files, tree = manifest["files"], manifest["tree"]
    return (
        isinstance(files, dict)
        and all(isinstance(w, dict) and {"bytes", "sha256"} <= w.keys() for w in files.values())
        and isinstance(tree, dict)
        and all(isinstance(leaf, list) for leaf in tree.values())
    )


def _checksum(content: Mapping[str, Any]) -> str:
    """Of the values, not of the bytes of the file."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _digests(folder: pathlib.Path, names: list[str], *, sync: bool = False) -> dict[str, str]:
    """sha256 of each file, several at once: hashing leaves the interpreter free."""

    def digest(name):
        with open(folder / name, "rb") as file:
            if sync:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))
