"""Stop strings as a table over token ids, so that a device can detect them.

A completion ends with the first token after which its bytes contain a stop string. The string may
begin inside a token, span several tokens, and be followed by more bytes of its last token. The
automaton reads bytes (Aho and Corasick, 1975). The table has its transitions for whole tokens, so
that a token step makes one look-up per slot. The bytes of a token are read from the tokenizer's own
file.

Dimension key:
    S: states
    V: tokens of the tokenizer
"""

import functools
import itertools
import json
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.tokenizer import Tokenizer

NO_STOP = 0
"""State of a row without stop strings; no token leaves it."""
ACCEPT = 1
"""State of a row that contains a stop string; no token leaves it."""
MOST_TABLE_BYTES = 2**28
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class StopAutomaton(NamedTuple):
    """A row starts in the state of its stop set and goes to next_SV[state, token]."""

    next_SV: np.ndarray
    """int16 [S, V]."""
    starts: tuple[int, ...]
    """The first state of every stop set, in the order given."""


def build_stop_automaton(
    token_bytes: Sequence[bytes], stop_sets: Sequence[Sequence[str]]
) -> StopAutomaton:
    """Makes one table for all stop sets.

    Args:
        token_bytes: of every token id, as `token_bytes` gives them.
        stop_sets: lists of stop strings, of which a request names one; an empty list starts in
            NO_STOP.

    Raises:
        ValueError: if a stop string is empty or not valid text, or the table would be too large.
    """
    V = len(token_bytes)
    patterns = [_shortest(stop_strings) for stop_strings in stop_sets]
    prefixes = [_proper_prefixes(stops) for stops in patterns]
    S = 2 + sum(len(ordered) for ordered in prefixes)
    table_bytes = S * V * np.dtype(np.int16).itemsize
    if table_bytes > MOST_TABLE_BYTES or np.iinfo(np.int16).max < S:
        raise ValueError(
            f"the stop strings of {len(stop_sets)} stop sets need {S} states over {V} tokens, a "
            f"table of {table_bytes / 2**20:.0f} MiB; at most {np.iinfo(np.int16).max} states and "
            f"{MOST_TABLE_BYTES / 2**20:.0f} MiB are allowed: give fewer or shorter ones"
        )
    # NO_STOP and ACCEPT, which no token leaves.
    steps = [np.full((1, 256), NO_STOP, np.int16), np.full((1, 256), ACCEPT, np.int16)]
    starts = []
    first = len(steps)
    for stops, ordered in zip(patterns, prefixes, strict=True):
        starts.append(first if stops else NO_STOP)
        steps.append(_byte_steps(stops, ordered, first))
        first += len(ordered)
    return StopAutomaton(_token_steps(np.concatenate(steps), token_bytes), tuple(starts))


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that every token id adds to the text of a completion, special tokens included.

    The space that some decoders drop at the very beginning of a text is kept.

    Raises:
        ValueError: if the tokenizer is neither byte-level nor sentencepiece-like.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        text = (pathlib.Path(folder) / "tokenizer.json").read_text("utf-8")
    pieces = parse_token_bytes(json.loads(text))
    return [pieces.get(token_id, b"") for token_id in range(tokenizer.vocab_size)]


def parse_token_bytes(description: Mapping[str, Any]) -> dict[int, bytes]:
    """Bytes per token id from the content of a tokenizer.json.

    Raises:
        ValueError: as `token_bytes` does.
    """
    decoders = list(_decoders(description.get("decoder") or {}))
    kinds = {decoder["type"] for decoder in decoders}
    replaces_space = any(
        decoder["type"] == "Replace" and decoder["pattern"] == {"String": _SPACE}
        for decoder in decoders
    )
    if "ByteLevel" in kinds:
        read = _byte_level_piece
    elif "Metaspace" in kinds or replaces_space:
        read = functools.partial(_sentencepiece_piece, byte_fallback="ByteFallback" in kinds)
    else:
        raise ValueError(
            "stop strings need a tokenizer that is byte-level or sentencepiece-like; this one "
            f"decodes by {', '.join(sorted(kinds)) or 'nothing'}: end completions by stop ids"
        )
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, Mapping):
        pieces = {token_id: read(piece) for piece, token_id in vocabulary.items()}
    else:
        pieces = {token_id: read(piece) for token_id, (piece, _) in enumerate(vocabulary)}
    for added in description.get("added_tokens") or ():
        # A special token is watched for as it is written; some decoders change what they show.
        special = added["special"]
        pieces[added["id"]] = added["content"].encode() if special else read(added["content"])
    return pieces


def _decoders(decoder: Mapping[str, Any]):
    """The decoders of a sequence, or the one decoder."""
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    elif decoder:
        yield decoder


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable characters stand for their own byte, later ones for the rest."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_piece(piece: str) -> bytes:
    alphabet = _byte_of_character()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode("utf-8")  # an added token, written as it reads


def _sentencepiece_piece(piece: str, *, byte_fallback: bool) -> bytes:
    if byte_fallback and _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SPACE, " ").encode("utf-8")


def _encoded(stop_string: str) -> bytes:
    if not stop_string:
        raise ValueError("a stop string must not be empty: it would end every completion at once")
    try:
        return stop_string.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the stop string {stop_string!r} is not valid text: {error}") from error


def _shortest(stop_strings: Sequence[str]) -> set[bytes]:
    """The strings without those that contain another one, which would be complete first."""
    stops = {_encoded(stop) for stop in stop_strings}
    return {stop for stop in stops if not any(other != stop and other in stop for other in stops)}


def _proper_prefixes(stops: set[bytes]) -> list[bytes]:
    """The proper prefixes of the stop strings, shortest first: one state each."""
    return sorted({stop[:size] for stop in stops for size in range(len(stop))}, key=len)


def _byte_steps(stops: set[bytes], ordered: list[bytes], first: int) -> np.ndarray:
    """int16 [states, 256]: the next state for each byte.

    A state is the longest proper prefix that the bytes so far end with. No stop string contains
    another, so one can only become complete at its own last byte.
    """
    state_of = {prefix: first + i for i, prefix in enumerate(ordered)}
    onward: dict[bytes, list[tuple[int, int]]] = {prefix: [] for prefix in ordered}
    for whole, state in [*state_of.items(), *((stop, ACCEPT) for stop in stops)]:
        if whole:
            onward[whole[:-1]].append((whole[-1], state))
    step = np.full((len(ordered), 256), first, np.int16)
    for row, prefix in zip(step, ordered, strict=True):
        if prefix:
            # A byte that does not continue this prefix leads where it leads from the next shorter
            # one.
            suffixes = (prefix[start:] for start in range(1, len(prefix) + 1))
            shorter = next(suffix for suffix in suffixes if suffix in state_of)
            row[:] = step[state_of[shorter] - first]
        for byte, state in onward[prefix]:
            row[byte] = state
    return step


def _token_steps(step: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """int16 [S, V]: the state after all bytes of a token, for every state and token."""
    longest_first = sorted(range(len(token_bytes)), key=lambda v: -len(token_bytes[v]))
    columns = []
    for place in range(max(map(len, token_bytes), default=0)):
        live = itertools.takewhile(lambda v: len(token_bytes[v]) > place, longest_first)  # noqa: B023
        columns.append(np.array([token_bytes[v][place] for v in live], np.uint8))
    next_SV = np.empty((len(step), len(token_bytes)), np.int16)
    for state, row in enumerate(next_SV):
        sorted_row = np.full(len(token_bytes), state, np.int16)
        for byte in columns:
            sorted_row[: len(byte)] = step[sorted_row[: len(byte)], byte]
        row[longest_first] = sorted_row
    return next_SV
