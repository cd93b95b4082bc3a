"""What two processes, or a run and its resume, compare of the records of one source."""

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class SourceHashes:
    """sha256, hex; `DataDigests` says what each covers."""

    prompts: str
    answers: str
    records: str


class SourceDigest:
    """Takes the prompts of a source one after the other."""

    def __init__(self, procedural: bool = False):
        """Args:
        procedural: a reasoning_gym task makes the records.
        """
        self._procedural = procedural
        self._tokens, self._answers, self._records = (hashlib.sha256() for _ in range(3))

    def add(self, index: int, token_ids_P: np.ndarray, answer: str, record: dict[str, Any]) -> None:
        """Takes the next one.

        Args:
            index: in the source.
            token_ids_P: int32 [P].
            record: as JSON values.
        """
        self._tokens.update(f"{index}:".encode())
        self._tokens.update(token_ids_P.tobytes())
        if self._procedural:
            record = record["reasoning_gym"]
        else:
            self._answers.update(_json_line(answer))
        self._records.update(_json_line(record))

    def hashes(self) -> SourceHashes:
        """Of all that were taken."""
        found = (self._tokens, self._answers, self._records)
        return SourceHashes(*(each.hexdigest() for each in found))


def _json_line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode() + b"\n"
