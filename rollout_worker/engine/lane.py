"""The host's record of one lane: which prompt is in which pool entry, which row in which place.

Of the pool's entries, the first hold prompts until their rows have entered a slot. The last ones
hold episodes between their turns, and the next turn's prompt as well, until the episode ends.

Nothing here touches a device. The device has a table of rows with `places` entries; `table` is the
host's copy, which goes to the device with every segment. The queue is a ring of places in that
table: the host only ever appends to it, the device lets rows into slots in this order by itself,
and the host learns from the tokens that come back which rows have entered a slot and which have
ended. A place is free again when its row has ended.

Dimension key:
    R: places
    E: stop ids of a row
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable

import numpy as np

from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow
from rollout_worker.engine.prefill import PromptPiece
from rollout_worker.engine.slots import ABORTED, FULL, GOES_ON, NOT_PARKED, STOPPED
from services.wire.messages import FinishReason

REASONS = {STOPPED: FinishReason.STOP, FULL: FinishReason.LENGTH, ABORTED: FinishReason.ABORTED}


@dataclasses.dataclass(eq=False)
class Row:
    """One completion from its request to its end."""

    request: DecodeRequest
    sample_index: int
    stop_state: int
    """Of the stop automaton after the tokens so far, when the row is queued."""
    token_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[np.ndarray] = dataclasses.field(default_factory=list)
    drawn: int = 0
    aborted: bool = False
    prefix: "Prefix | None" = None
    """The prompt that it starts from, once it is queued."""
    in_slot: bool = False
    """Known to have entered a slot."""
    parking: int = NOT_PARKED
    """Pool entry that is reserved for it, once it is queued."""

    @property
    def turn_of(self) -> tuple[str, int] | None:
        """Episode and sample index under which it is parked."""
        episode = self.request.episode
        return None if episode is None else (episode, self.sample_index)

    @property
    def tokens(self) -> np.ndarray:
        """int32: the prompt and the tokens so far."""
        return np.concatenate([self.request.token_ids, *self.token_ids])

    def add_tokens(self, token_ids: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Appends the tokens that a segment drew for it under a policy version."""
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        self.versions.append(np.full(len(token_ids), version, np.int32))
        self.drawn += len(token_ids)

    def discard_tokens(self) -> None:
        """Removes all tokens: the row starts again."""
        self.token_ids, self.logprobs, self.versions, self.drawn = [], [], [], 0

    def finished(self, reason: FinishReason) -> FinishedRow:
        """The row as the engine returns it."""
        return FinishedRow(
            request_id=self.request.request_id,
            sample_index=self.sample_index,
            token_ids=np.concatenate([np.zeros(0, np.int32), *self.token_ids]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *self.logprobs]),
            versions=np.concatenate([np.zeros(0, np.int32), *self.versions]),
            finish_reason=reason,
        )

    def columns(self, steps: int) -> int:
        """Cache columns that the row has written after `steps` further token steps, at most."""
        prompt = len(self.request.token_ids)
        # The last token drawn is never run, so it takes no column.
        return prompt - 1 + min(self.drawn + steps, self.request.max_new_tokens)


@dataclasses.dataclass(eq=False)
class Prefix:
    """Token ids whose keys and values are computed once, and the rows that start from them."""

    token_ids: np.ndarray
    """int32: the prompt and, for a row that goes on under a newer policy, its tokens so far."""
    rows: deque[Row]
    """Not yet queued."""
    entry: int = -1
    """Of the prefix pool."""
    number: int = -1
    """Unique among the prefixes of its lane."""
    prefilled: int = 0
    """Tokens whose keys and values are in the pool, or will be by the calls that were started."""
    outside: int = 0
    """Rows that have not entered a slot: until then the pool entry is needed."""
    parked: bool = False
    """Whether its entry is one of an episode, in which its row will be parked again."""

    @property
    def turn_of(self) -> tuple[str, int] | None:
        """Episode and sample index, where it is the next turn of one that may be parked."""
        return self.rows[0].turn_of if len(self.rows) == 1 else None

    def next_chunk(self, longest: int) -> tuple[int, int] | None:
        """Start and length of the next chunk to prefill; None when all is prefilled."""
        left = len(self.token_ids) - 1 - self.prefilled
        return (self.prefilled, min(left, longest)) if left else None


def group_by_prefix(rows: list[Row]) -> list[Prefix]:
    """The prefixes that rows start from: samples of a prompt that have no tokens share one."""
    prefixes: dict[object, Prefix] = {}
    for row in rows:
        key = row if row.drawn else row.request.request_id
        tokens = row.tokens if row.drawn else row.request.token_ids
        prefix = prefixes.setdefault(key, Prefix(tokens, deque()))
        prefix.rows.append(row)
        prefix.outside += 1
    return list(prefixes.values())


class Parking:
    """The pool entries for episodes: free, reserved for a row, or with the keys and values of one
    that has ended. Of the latter the oldest is given up where an entry is needed.
    """

    def __init__(self, entries: Iterable[int]):
        self._free = deque(entries)
        self._parked: dict[tuple[str, int], tuple[int, np.ndarray]] = {}
        """Entry and the tokens in it, by episode and sample index; the oldest first."""

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, turn_of: tuple[str, int] | None) -> bool:
        return turn_of in self._parked

    def reserve(self) -> int:
        """An entry for a row that was queued; NOT_PARKED where other rows have them all."""
        if not self._free and self._parked:
            self.drop(next(iter(self._parked)))
        return self._free.popleft() if self._free else NOT_PARKED

    def release(self, entry: int) -> None:
        """Frees the entry of a row that is not parked after all."""
        if entry != NOT_PARKED:
            self._free.append(entry)

    def park(self, row: Row) -> None:
        """Keeps a row that has ended in the entry that was reserved for it, if one was."""
        if row.parking != NOT_PARKED:
            assert row.turn_of is not None
            self.drop(row.turn_of)
            # The last token was drawn but never run.
            self._parked[row.turn_of] = row.parking, row.tokens[:-1]

    def take(self, prefix: Prefix) -> bool:
        """Has a prefix start from what is parked of its episode; returns whether there was any."""
        found = self._parked.pop(prefix.turn_of, None) if prefix.turn_of else None
        if found is None:
            return False
        prefix.entry, known = found
        prefix.parked = True
        prefix.prefilled = _shared_tokens(known, prefix.token_ids[:-1])
        return True

    def drop(self, turn_of: tuple[str, int]) -> None:
        """Gives up what is parked of an episode's sample, if anything is."""
        if turn_of in self._parked:
            self._free.append(self._parked.pop(turn_of)[0])

    def drop_episode(self, episode: str) -> None:
        """Gives up what is parked of all samples of an episode."""
        for turn_of in [one for one in self._parked if one[0] == episode]:
            self.drop(turn_of)


def _shared_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens with which both begin."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


class Lane:
    """Places, pool entries and rows of one lane; made anew for every policy version."""

    def __init__(self, *, places: int, prefixes: int, parked: int, stop_ids: int):
        self._free_places = deque(range(places))
        self._free_entries = deque(range(prefixes))
        self.parking = Parking(range(prefixes, prefixes + parked))
        self._rows: dict[int, Row] = {}
        """By place: rows that were queued and are not known to have ended."""
        self._numbers = itertools.count()
        self._entered = 0
        """Rows that are known to have entered a slot, those that have ended included."""
        self._ended = 0
        self._preparing: list[Prefix] = []
        """Prefixes that are being prefilled, or whose rows wait for a place."""
        self.table = empty_table(places, stop_ids, parks=parked > 0)

    @property
    def has_entry(self) -> bool:
        """Whether a pool entry is free."""
        return bool(self._free_entries)

    @property
    def queued(self) -> int:
        """Rows that were queued and are not known to have ended, those in slots included."""
        return len(self._rows)

    @property
    def in_slots(self) -> int:
        """Rows known to be in a slot."""
        return self._entered - self._ended

    @property
    def stock(self) -> int:
        """Rows that may enter a slot, or will be able to when their prompt is prefilled."""
        waiting = self.queued - self.in_slots
        return waiting + sum(len(prefix.rows) for prefix in self._preparing)

    def add_prefix(self, prefix: Prefix) -> None:
        """Gives a prefix an entry of the pool, with what is parked of its episode or without; its
        chunks are to be prefilled.
        """
        if not self.parking.take(prefix):
            prefix.entry = self._free_entries.popleft()
        prefix.number = next(self._numbers)
        self._preparing.append(prefix)

    def chunks_due(self, longest: int) -> list[tuple[int, int]]:
        """(start, length) of the next chunk of every prefix, the oldest first."""
        due = (prefix.next_chunk(longest) for prefix in self._preparing)
        return [chunk for chunk in due if chunk is not None]

    def take_pieces(self, fits, prompts: int, longest: int) -> list[PromptPiece]:
        """Chunks for one prefill call, at most `prompts` of them.

        Args:
            fits: of (start, length), whether the call takes such a chunk.
        """
        pieces = []
        for prefix in self._preparing:
            chunk = prefix.next_chunk(longest)
            if chunk is None or len(pieces) == prompts or not fits(*chunk):
                continue
            start, length = chunk
            pieces.append(
                PromptPiece(prefix.entry, start, prefix.token_ids[start : start + length])
            )
            prefix.prefilled += length
        return pieces

    def queue_rows(self) -> None:
        """Queues the rows whose prefix is in the pool, while places are free."""
        for prefix in self._preparing:
            while prefix.next_chunk(1) is None and prefix.rows and self._free_places:
                self._queue_row(prefix, prefix.rows.popleft())
        self._preparing = [prefix for prefix in self._preparing if prefix.rows]

    def close_queue(self) -> None:
        """Hides the rows that have not entered a slot; every segment must be collected before."""
        self.table["tail"][0] = self._entered

    def needed_width(self, steps: int) -> int:
        """Cache columns that the rows may write within `steps` token steps."""
        return max((row.columns(steps) for row in self._rows.values()), default=1)

    def collect(
        self,
        place: np.ndarray,
        token: np.ndarray,
        logprob: np.ndarray,
        ended: np.ndarray,
        version: int,
    ) -> list[FinishedRow]:
        """Gives every row the tokens that a segment drew for it.

        Args:
            place, token, logprob, ended: [steps, slots] as in `slots.SegmentTokens`.
            version: policy version of the segment.

        Returns:
            rows that have ended.
        """
        # Slot by slot, so that the tokens of a row stay in their order.
        place, token, logprob, ended = (
            array.T.reshape(-1) for array in (place, token, logprob, ended)
        )
        order = np.argsort(place, kind="stable")
        order = order[np.searchsorted(place[order], 0) :]
        bounds = np.flatnonzero(np.diff(place[order])) + 1
        finished = []
        for index in np.split(order, bounds) if len(order) else []:
            where = int(place[index[0]])
            row = self._rows[where]
            if not row.in_slot:
                row.in_slot = True
                self._entered += 1
                assert row.prefix is not None
                self._release(row.prefix, 1)
            if not row.aborted:
                row.add_tokens(token[index], logprob[index], version)
            end = int(ended[index[-1]])
            if end != GOES_ON:
                reason = FinishReason.ABORTED if row.aborted else REASONS[end]
                finished.append(row.finished(reason))
                if reason is FinishReason.ABORTED:
                    self.parking.release(row.parking)
                else:
                    self.parking.park(row)
                del self._rows[where]
                self._ended += 1
                self._free_places.append(where)
        return finished

    def abort_request(self, request_id: str) -> list[Row]:
        """Removes and returns the rows of a request that were not queued.

        The others end at their next token.
        """
        gone: list[Row] = []
        for prefix in self._preparing:
            if prefix.rows and prefix.rows[0].request.request_id == request_id:
                gone += prefix.rows
                self._release(prefix, len(prefix.rows))
                if prefix.parked:
                    self.parking.release(prefix.entry)
                prefix.rows.clear()
        self._preparing = [prefix for prefix in self._preparing if prefix.rows]
        for place, row in self._rows.items():
            if row.request.request_id == request_id:
                row.aborted = True
                self.table["aborted_R"][place] = True
        return gone

    def unfinished_rows(self) -> list[Row]:
        """Every row that has not ended, those with the most tokens first."""
        queued = sorted(self._rows.values(), key=lambda row: -row.drawn)
        return queued + [row for prefix in self._preparing for row in prefix.rows]

    def _queue_row(self, prefix: Prefix, row: Row) -> None:
        place = self._free_places.popleft()
        self._rows[place] = row
        row.prefix, row.in_slot, row.parking = prefix, False, self._parking_entry(prefix, row)
        table, request, settings = self.table, row.request, row.request.sampling
        table["order_R"][table["tail"][0] % len(table["order_R"])] = place
        table["tail"][0] += 1
        table["stop_ids_RE"][place] = -1
        stop_ids = request.stop_ids or ()
        table["stop_ids_RE"][place, : len(stop_ids)] = stop_ids
        for name, value in (
            ("prefix_R", prefix.entry),
            ("group_R", prefix.number),
            ("token_R", prefix.token_ids[-1]),
            ("position_R", len(prefix.token_ids) - 1),
            ("drawn_R", row.drawn),
            ("limit_R", request.max_new_tokens),
            ("base_key_R2", request.key_data),
            ("identity_R3", (request.prompt_id, request.epoch, row.sample_index)),
            ("temperature_R", settings.temperature),
            ("top_k_R", settings.top_k),
            ("top_p_R", settings.top_p),
            ("min_p_R", settings.min_p),
            ("stop_state_R", row.stop_state),
            ("aborted_R", row.aborted),
        ):
            table[name][place] = value
        if "parking_R" in table:
            table["parking_R"][place] = row.parking

    def _parking_entry(self, prefix: Prefix, row: Row) -> int:
        if prefix.parked:
            return prefix.entry
        return NOT_PARKED if row.turn_of is None else self.parking.reserve()

    def _release(self, prefix: Prefix, rows: int) -> None:
        """Counts rows that no longer need the prefix's pool entry, which the last one frees."""
        prefix.outside -= rows
        if prefix.outside == 0 and not prefix.parked:
            self._free_entries.append(prefix.entry)


def empty_table(places: int, stop_ids: int, *, parks: bool = False) -> dict[str, np.ndarray]:
    """The arrays of `slots.Rows`, those of its sampling settings among them."""
    integers = [
        "order",
        "prefix",
        "group",
        "token",
        "position",
        "drawn",
        "limit",
        "top_k",
        "stop_state",
    ]
    return {
        **{f"{name}_R": np.zeros(places, np.int32) for name in integers},
        **({"parking_R": np.full(places, NOT_PARKED, np.int32)} if parks else {}),
        "temperature_R": np.ones(places, np.float32),
        "top_p_R": np.ones(places, np.float32),
        "min_p_R": np.zeros(places, np.float32),
        "tail": np.zeros(1, np.int32),
        "base_key_R2": np.zeros((places, 2), np.uint32),
        "identity_R3": np.zeros((places, 3), np.int32),
        "stop_ids_RE": np.full((places, stop_ids), -1, np.int32),
        "aborted_R": np.zeros(places, bool),
    }
