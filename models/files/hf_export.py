"""Writes a Hugging Face folder atomically: the complete folder appears, or none."""

import contextlib
import json
import pathlib
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from models.files.hf_folder import ADAPTER, ADAPTER_CONFIG, CONFIG, INDEX, SINGLE
from models.files.safetensors_file import DTYPES, write_file

MAX_SHARD_BYTES = 4 * 2**30


@contextlib.contextmanager
def appearing_whole(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write into, which is renamed to the target if the block succeeds.

    Raises:
        ValueError: at the start, if the target holds something other than an earlier export.
    """
    refuse_unrelated(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    scratch.mkdir()  # not mkdtemp, which makes it private whatever the umask says
    try:
        yield scratch
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
    model = CONFIG in present and present & {SINGLE, INDEX}
    if present and not model and not {ADAPTER_CONFIG, ADAPTER} <= present:
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


def cast_to_stored(
    named: Mapping[str, np.ndarray], dtypes: Mapping[str, np.dtype]
) -> dict[str, np.ndarray]:
    """Tensors in the types that an export is to have.

    A tensor with a value that float16 cannot hold stays as it is.

    Args:
        named: float32 or bfloat16.
        dtypes: float32, bfloat16 or float16 for each name.
    """
    cast = {}
    for name, array in named.items():
        with np.errstate(over="ignore"):
            smaller = array.astype(dtypes[name], copy=False)
        overflows = smaller.dtype == np.float16 and not np.isfinite(smaller).all()
        cast[name] = array if overflows else smaller
    return cast


def dtype_names(arrays: Iterable[Any]) -> list[str]:
    """The types of these arrays, the widest first."""
    names = {np.dtype(array.dtype).name for array in arrays}
    return sorted(names, key=[dtype.name for dtype in DTYPES.values()].index)


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
