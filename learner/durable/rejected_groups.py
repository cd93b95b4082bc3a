"""Files of groups that did not train, kept for inspection: those of an update that was not finite,
and those that cannot train. Where they cannot be written, as on a full disk, the run goes on.
"""

import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from services.process.whole_file import write_whole
from services.wire.messages import FinishReason, Group

log = logging.getLogger(__name__)


def write_rejected(folder: pathlib.Path, policy_version: int, groups: Sequence[Group]) -> None:
    """Writes the groups of an update that was not finite, one JSON object a line.

    Args:
        folder: made when there is something to write.
        policy_version: that the update was to make; names the file.
        groups: none where the update was finite.
    """
    if not groups:
        return
    _write(folder / f"version-{policy_version:08d}.jsonl", map(dataclasses.asdict, groups))


def write_unfit(folder: pathlib.Path, unfit: Sequence[tuple[Group, str]]) -> None:
    """Writes the accepted groups that cannot train to `unfit.jsonl`, each with the reason."""
    if unfit:
        records = (dataclasses.asdict(group) | {"reason": reason} for group, reason in unfit)
        _write(folder / "unfit.jsonl", records)


def _write(path: pathlib.Path, records: Iterable[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(_plain(record)) + "\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lines)
    except OSError as error:
        log.warning("groups that did not train are not kept in %s: %s", path, error)


def _plain(value: Any) -> Any:
    """As JSON values; a number that is not finite becomes text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, FinishReason):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
