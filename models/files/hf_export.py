"""Writes a Hugging Face folder atomically: the complete folder appears, or none."""

import contextlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from models.files.hf_folder import CONFIG, INDEX, SINGLE
from models.files.safetensors_file import write_file

MAX_SHARD_BYTES = 4 * 2**30


@contextlib.contextmanager
def appearing_whole(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write into, which is renamed to the target if the block succeeds.

    Raises:
        ValueError: at the start, if the target holds something other than an earlier export.
    """
    refuse_unrelated(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)  # mkdtemp makes it private
        _swap_in(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_unrelated(target: pathlib.Path) -> None:
    """Raises ValueError unless the path is free, an empty folder, or an earlier export."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"cannot save the model to {target}: it is a file")
    present = {item.name for item in target.iterdir()}
    if present and not (CONFIG in present and present & {SINGLE, INDEX}):
        raise ValueError(
            f"cannot save the model to {target}: it is not empty and is no earlier export "
            f"(holds {', '.join(sorted(present)[:5])}); choose another folder"
        )


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file as Hugging Face does, indented by two."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(folder: pathlib.Path, named: Mapping[str, Any]) -> None:
    """One safetensors file, or shards of at most MAX_SHARD_BYTES with their index."""
    shards: list[dict[str, Any]] = [{}]
    shard_bytes = 0
    for name, array in named.items():
        if shards[-1] and shard_bytes + array.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = array
        shard_bytes += array.nbytes
    if len(shards) == 1:
        write_file(folder / SINGLE, list(named.items()))
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, list(shard.items()))
        weight_map |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in named.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _swap_in(scratch: pathlib.Path, target: pathlib.Path) -> None:
    """Renames the folder to the target; an earlier export is renamed first, then removed.

    A rename cannot replace a folder that holds files.
    """
    aside = scratch.with_name(scratch.name + ".old")
    if target.exists():
        target.rename(aside)
    try:
        scratch.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
