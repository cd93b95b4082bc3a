"""Finds a model's files, and reads a Hugging Face folder's JSON and tensor table.

Nothing here reads tensor data: an incomplete folder is refused from its headers alone.
"""

import json
import logging
import pathlib
import re
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from models.files.safetensors_file import TensorEntry, read_header

log = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", *LICENCES)


def locate(path: str, *, weights: bool) -> pathlib.Path:
    """The HF folder or GGUF file that a model path means.

    Args:
        path: an HF folder, a .gguf file, or a hub id such as `Qwen/Qwen2.5-3B-Instruct`, which is
            fetched into Hugging Face's cache.
        weights: whether a hub id's safetensors are needed too, or only its small files.

    Raises:
        ValueError: if there is no such folder or file, and the hub does not give it either.
    """
    local = pathlib.Path(path).expanduser()
    if local.is_dir() or (local.is_file() and is_gguf(local)):
        return local
    if local.is_file():
        raise ValueError(
            f"model path {path!r} is a file but not .gguf: give the HF folder that holds it, a "
            ".gguf file or a hub id"
        )
    if is_gguf(local) or not _HUB_ID.fullmatch(path):
        raise ValueError(
            f"model path {path!r} does not exist: give an HF folder, a .gguf file or a hub id "
            "(owner/name)"
        )
    return _fetch(path, weights)


def is_gguf(path: pathlib.Path) -> bool:
    """Whether the name is that of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def _fetch(hub_id: str, weights: bool) -> pathlib.Path:
    patterns = [*_SMALL_FILES, *(["model*.safetensors"] if weights else [])]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"model path {hub_id!r} is no folder here, is not in Hugging Face's cache, and the hub "
            "cannot be reached: check the network, or give a local folder or .gguf file"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ValueError(
            f"model path {hub_id!r} is no folder here and the hub refuses it: {error}"
        ) from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; an error names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        present = sorted(item.name for item in path.parent.iterdir())[:12]
        raise ValueError(
            f"{path.parent} has no {path.name}: it holds {', '.join(present) or 'nothing'}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON (cut short?): {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_json_if_there(path: pathlib.Path) -> dict[str, Any]:
    """As `read_json`; empty where there is no such file."""
    return read_json(path) if path.is_file() else {}


def tensor_table(folder: pathlib.Path) -> dict[str, TensorEntry]:
    """Where every tensor of a folder lies, from its index and the headers of the files it names.

    An index decides alone: safetensors that it does not name are strays and stay unread.

    Raises:
        ValueError: if a file is absent or damaged, or index and headers disagree; names the file
            and the tensors.
    """
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return read_header(folder / SINGLE)
        raise ValueError(_no_weights(folder))
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map")
    shards = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in shards if pathlib.PurePath(name).name != name]
    if outside:
        raise ValueError(f"{folder / INDEX} names files outside its folder: {', '.join(outside)}")
    absent = [name for name in shards if not (folder / name).is_file()]
    if absent:
        raise ValueError(
            f"{folder} lacks {', '.join(absent)}, which {INDEX} names: fetch the folder again"
        )
    _report_strays(folder, shards)
    table = {}
    for shard in shards:
        header = read_header(folder / shard)
        mapped = {name for name, file in weight_map.items() if file == shard}
        for what, names in (("lacks", mapped - set(header)), ("adds", set(header) - mapped)):
            if names:
                raise ValueError(
                    f"{folder / shard} {what} {', '.join(sorted(names)[:8])}"
                    f"{' and more' if len(names) > 8 else ''} compared with {INDEX}"
                )
        table |= header
    return table


def _no_weights(folder: pathlib.Path) -> str:
    expected = f"{folder} has no weights: expected {SINGLE}, or {INDEX} with its shards"
    parts = sorted(item.name for item in folder.glob("*.safetensors"))
    if parts:
        return f"{expected}; {', '.join(parts[:4])} without {INDEX} cannot be trusted to be all"
    pickles = sorted(item.name for item in folder.glob("*.bin"))
    if pickles:
        return f"{expected}; {', '.join(pickles[:4])} is pickle: convert it to safetensors"
    return expected


def _report_strays(folder: pathlib.Path, shards: list[str]) -> None:
    strays = sorted({item.name for item in folder.glob("*.safetensors")} - set(shards))
    if strays:
        log.warning("%s: ignoring %s, which %s does not name", folder, ", ".join(strays), INDEX)
