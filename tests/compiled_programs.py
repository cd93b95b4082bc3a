"""Keeps what JAX compiles in one run of the tests for the next one.

The tests compile the same small programs again and again, in many files and in the processes of the
services that they start. JAX shares programs through a folder, but it writes an entry in place, and
tests kill processes at any moment. So a run of the tests has a folder of its own, which starts with
hard links to the user's entries; at its end its new entries that are whole are linked back.
"""

import atexit
import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import tempfile
import time
import zlib

KEPT_BYTES = 2 * 2**30
LEFT_BEHIND_S = 2 * 24 * 3600.0
"""A run's folder that is older was left by a run that was killed."""


def share_folder() -> None:
    """Gives this process, and all that it starts, the folder of a new run."""
    kept = user_folder()
    run = start(kept)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(run)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    # The caches of XLA for a GPU lie below the folder, and their path would be part of every key.
    os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    atexit.register(end, run, kept)


def user_folder() -> pathlib.Path:
    """Where the programs of this JAX on this kind of processor are kept between runs."""
    caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    jax, jaxlib = (importlib.metadata.version(name) for name in ("jax", "jaxlib"))
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        processor += "".join(sorted({x for x in lines if x.startswith(("model name", "flags"))}))
    processor = hashlib.sha256(processor.encode()).hexdigest()[:12]
    return caches / "tandem" / "test-compilation" / f"jax-{jax}-{jaxlib}-{processor}"


def start(kept: pathlib.Path) -> pathlib.Path:
    """Makes the folder of one run, with all that is kept.

    Args:
        kept: made if it is absent.
    """
    kept.mkdir(parents=True, exist_ok=True)
    for folder in kept.glob("run-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > LEFT_BEHIND_S:
                shutil.rmtree(folder, ignore_errors=True)
    run = pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=kept))
    for entry in kept.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another run may remove it
            os.link(entry, run / entry.name)
    return run


def end(run: pathlib.Path, kept: pathlib.Path, kept_bytes: int = KEPT_BYTES) -> None:
    """Keeps the new entries of a run, removes its folder, and then the oldest entries that are
    too many."""
    for entry in run.glob("*-cache"):
        if not (kept / entry.name).exists() and _is_whole(entry):
            with contextlib.suppress(FileExistsError):
                os.link(entry, kept / entry.name)
    shutil.rmtree(run, ignore_errors=True)
    sizes = []
    for entry in kept.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append((entry.stat().st_mtime, entry.stat().st_size, entry))
    total_bytes = sum(size for _, size, _ in sizes)
    for _, size, entry in sorted(sizes):
        if total_bytes <= kept_bytes:
            break
        entry.unlink(missing_ok=True)
        total_bytes -= size


def _is_whole(entry: pathlib.Path) -> bool:
    """Whether it was written to its end; JAX compresses with zstandard only where that is there."""
    try:
        zlib.decompress(entry.read_bytes())
    except zlib.error:
        return False
    return True
