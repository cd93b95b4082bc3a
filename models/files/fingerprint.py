"""A short text that tells one model's files from another's, without reading all their weights."""

import hashlib
import pathlib

from models.files.hf_folder import CONFIG, is_gguf, locate, tensor_table

_PIECES = 64
_PIECE_BYTES = 2**16


def fingerprint(path: str) -> str:
    """sha256, hex, of a model's config and of 64 pieces of 64 KiB of every file of its weights.

    The pieces are spread evenly, from the first byte to the last. Two trainings of a model differ
    in nearly every number, so that they differ in these; a change of a few numbers may not show.

    Args:
        path: HF folder, .gguf file or hub id, whose files are fetched for it.

    Raises:
        ValueError: if there is no model.
    """
    place = locate(path, weights=True)
    if is_gguf(place):
        return _digest([place])
    files = sorted({entry.path for entry in tensor_table(place).values()})
    return _digest([place / CONFIG, *files])


def _digest(files: list[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size}\n".encode())
        last = max(0, size - _PIECE_BYTES)
        with file.open("rb") as opened:
            for start in sorted({last * piece // (_PIECES - 1) for piece in range(_PIECES)}):
                opened.seek(start)
                digest.update(opened.read(_PIECE_BYTES))
    return digest.hexdigest()
