"""Files that their readers see whole or not at all."""

import contextlib
import errno
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: pathlib.Path, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes the place of `path` when the block ends.

    It is written beside it under a dotted name. After an error `path` is as it was.

    Args:
        path: in a folder that exists.
        sync: whether the bytes are on the disk before the file takes its place.
    """
    owner = f"{os.getpid()}-{threading.get_native_id()}"
    part = path.with_name(f".{path.name}.{owner}.part")
    try:
        with part.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: pathlib.Path, content: str | bytes, *, sync: bool = False) -> None:
    """Writes a file as `whole_file` does; text as UTF-8."""
    with whole_file(path, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_writable(path: pathlib.Path, option: str) -> None:
    """Refuses a file that could not be written, before the work whose result it is to hold.

    Args:
        option: what named it, for the message.

    Raises:
        ValueError: naming the value, the rule and the fix.
    """
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: its folder does not exist: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path} may not be written: name another file")


def make_folder(folder: pathlib.Path) -> None:
    """Makes a folder and those above it that are missing, and waits until they are on the disk."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Waits until renames and new files in a folder are on the disk.

    Does nothing on a file system that cannot sync a folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: pathlib.Path) -> None:
    """Syncs a folder and all below it, the lowest first; links are not followed."""
    for path, _, _ in os.walk(folder, topdown=False):
        sync_folder(pathlib.Path(path))
