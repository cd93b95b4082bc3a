"""The decode engine: requests in, finished rows out, by continuous batching on the device.

It knows token ids and keys, never text, Ray or gRPC. A row is one completion. On its way it is

1. in `_waiting`, on the host, with the other rows of its prompt;
2. in a lane's table: the prompt is prefilled into an entry of the lane's prefix pool, chunk by
   chunk, and the row is queued in a place of the table;
3. in a slot: the device itself takes the next row of the queue whenever a slot is free, in the
   middle of a segment, so that no slot waits for the host while rows are queued;
4. where it is a turn of an episode: parked, in an entry of the pool, until the next turn's request
   comes, the episode ends, the policy changes or younger ones need the entry. A turn draws the same
   tokens whether the turns before it were parked or are prefilled anew. Keys and values of a token
   step and of a prefill differ in rounding alone: logprobs by some 1e-5 in float32, by the noise of
   bfloat16 where activations have that type, where a draw that is so close may then differ.

`step` is one turn of the host: start prefill calls, start a segment (up to `segment_tokens` token
steps in one program), then collect the tokens of the segment before it. Device programs run in the
order in which they were started, so the device decodes the new segment while the host deals with
the tokens of the one before.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import jax
import numpy as np

from models.transformer import Params
from rollout_worker.engine.decode_programs import DecodePrograms
from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow, OnSwap
from rollout_worker.engine.device_state import DeviceState
from rollout_worker.engine.engine_limits import (
    EngineLimits,
    check_params,
    check_request,
    geometry_of,
)
from rollout_worker.engine.lane import Lane, Prefix, Row, group_by_prefix
from rollout_worker.engine.program_cache import Compilation, ProgramCache
from rollout_worker.engine.slots import DecodeSpec, SegmentTokens
from rollout_worker.engine.stop_strings import StopAutomaton
from services.process.phase_clock import PhaseClock
from services.wire.messages import FinishReason

BUSY_SHARE = 0.9
"""With fewer slots busy than this, a segment ends early for a host that has more prompts."""
PREFILLS_WHEN_IDLE = 4
"""Prefill calls of a turn while half of the slots or more are idle; otherwise one."""


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A segment that was started and whose tokens have not been collected."""

    tokens: SegmentTokens
    version: int
    prefilled: list[jax.Array]
    """Markers of the prefill calls just before the segment: each is ready when its call is."""


@dataclasses.dataclass(kw_only=True)
class EngineCounts:
    """What the engine has done since it was built, or since its user replaced the record."""

    tokens: int = 0
    token_steps: int = 0
    """Of all slots at once; the longest of the lanes counts."""
    slot_steps: int = 0
    """token_steps x slots of all lanes."""
    prompts: int = 0
    prefilled_tokens: int = 0
    """Of prompts, without padding; the last token of a prompt is a token step."""
    reused_tokens: int = 0
    """Of prompts, whose keys and values were parked."""
    prefill_calls: int = 0
    segments: int = 0

    @property
    def occupancy(self) -> float:
        """Share of the slots' token steps that drew a token."""
        return self.tokens / self.slot_steps if self.slot_steps else 0.0


class Engine:
    """Owns the slots, the compiled programs and the policy that they run under."""

    def __init__(
        self,
        spec: DecodeSpec,
        limits: EngineLimits,
        *,
        loop: Literal["while", "python"],
        stop_ids: Sequence[int],
        clock: PhaseClock,
        stops: StopAutomaton | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ):
        """Args:
        loop: `python` ends each segment after one token: the slow side of an A/B.
        stop_ids: of requests that name none of their own.
        clock: gets the seconds of `compile`, `prefill` and `decode`.
        stops: stop strings that requests may ask for.
        warn: called with the text of a warning.
        """
        if loop not in ("while", "python"):
            raise ValueError(f"loop must be while or python, got {loop!r}")
        if loop == "python":
            spec = dataclasses.replace(spec, segment_tokens=1)
        self.spec = spec
        self.limits = limits
        # Segments that may be under way when `step` returns.
        self._depth = 1 if loop == "while" else 0
        self._stop_ids = tuple(stop_ids)
        self._clock = clock
        self._stops = stops
        self.programs = DecodePrograms(spec, geometry_of(spec, limits, stops))
        planned = sum(1 for _ in self.programs.planned())
        self._compiled = ProgramCache(
            clock,
            budget=planned if limits.compile_budget is None else limits.compile_budget,
            over_budget=limits.over_budget,
            warn=warn,
        )
        self.device = DeviceState(self.programs, self._compiled, stops)
        self.version = -1
        self.counts = EngineCounts()
        self._waiting: deque[Prefix] = deque()
        self._flights: deque[_Flight] = deque()
        self._finished: list[FinishedRow] = []
        self._lanes: list[Lane] = []
        self._broken = False

    @property
    def compilations(self) -> list[Compilation]:
        """Every program that was compiled, in this order."""
        return self._compiled.compilations

    @property
    def resizes(self) -> int:
        """Number of times the cache was made wider or narrower."""
        return self.device.resizes

    @property
    def usable(self) -> bool:
        """Whether `step` may be called: a policy is loaded, and no step failed since."""
        return self.device.loaded and not self._broken

    @property
    def pending(self) -> bool:
        """Whether a request is not finished, or was not yet returned by `step`."""
        return self._busy or bool(self._finished)

    @property
    def _busy(self) -> bool:
        lanes = any(lane.queued or lane.stock for lane in self._lanes)
        return lanes or bool(self._waiting or self._flights)

    def peak_bytes(self) -> int:
        """Device bytes of the largest compiled program, as the compiler counts them."""
        return self._compiled.peak_bytes()

    def swap_policy(self, params: Params, version: int) -> None:
        """Makes another policy the current one, as `EngineLimits.on_swap` says.

        Slots and pool are emptied, parked episodes included: keys and values of an older policy are
        never read again. After
        a step that failed, segments under way are lost and their rows start again.

        Args:
            params: the inference copy, made by the layout of `spec`.
            version: stamped on every token that it draws.

        Raises:
            ValueError: if it is the copy of another model. Nothing has changed then.
        """
        check_params(params, self.programs.params_struct())
        was_broken, self._broken = self._broken, True  # until all of it has gone well
        if was_broken:
            self._flights.clear()
        elif self._lanes:
            self._collect_all()
            if self.limits.on_swap is OnSwap.FINISH:
                self._finish_slots()
        rows = [row for lane in self._lanes for row in lane.unfinished_rows()]
        self._lanes = []
        self._requeue(rows)
        self.device.load_policy(params)
        g = self.programs.geometry
        self._lanes = [
            Lane(places=g.places, prefixes=g.prefixes, parked=g.parked, stop_ids=g.stop_ids)
            for _ in range(self.spec.lanes)
        ]
        self.version = version
        self._broken = False

    def submit_requests(self, requests: Sequence[DecodeRequest]) -> None:
        """Accepts requests; those that come first are decoded first.

        Raises:
            ValueError: if one does not fit what the engine was built for. None is accepted then.
        """
        names = self._request_ids()
        requests = [
            dataclasses.replace(request, stop_ids=self._stop_ids)
            if request.stop_ids is None
            else request
            for request in requests
        ]
        for request in requests:
            check_request(request, self.spec, self.limits, self._stop_sets)
            if request.request_id in names:
                raise ValueError(f"request {request.request_id} is being decoded: ids must differ")
            names.add(request.request_id)
        for request in requests:
            rows = [Row(request, sample, self._start_state(request)) for sample in request.samples]
            self._waiting.extend(group_by_prefix(rows))

    def step(self, account: str | None = None) -> list[FinishedRow]:
        """One turn.

        Args:
            account: ledger phase for its time, instead of `prefill` and `decode`.

        Returns:
            rows that ended, in no order that may be relied on.

        Raises:
            RuntimeError: if there is no policy yet, or an earlier step failed and no policy was
                swapped in since: the slots on the device and the host's tables may differ.
        """
        if not self.usable:
            why = "an earlier step or swap failed" if self._broken else "the engine has no policy"
            raise RuntimeError(f"{why}: call swap_policy before step")
        self._broken = True  # until all of it has gone well
        markers = self._prefill()
        for lane in self._lanes:
            lane.queue_rows()
        dispatched = self._dispatch(markers)
        while len(self._flights) > (self._depth if dispatched else 0):
            self._collect(account)
        if not self._busy:
            self.device.narrow_cache()
        self._broken = False
        finished, self._finished = self._finished, []
        return finished

    def tokens_so_far(self, request_id: str) -> dict[int, np.ndarray]:
        """int32 [T]: tokens of a request's completions that have not ended, by sample index."""
        rows = (row for lane in self._lanes for row in lane.unfinished_rows())
        return {
            row.sample_index: np.concatenate([np.zeros(0, np.int32), *row.token_ids])
            for row in rows
            if row.request.request_id == request_id
        }

    def abort_request(self, request_id: str) -> None:
        """Ends a request's rows with the reason `aborted` and the tokens that they have.

        What is parked of their episodes is given up.
        """
        gone = [row for lane in self._lanes for row in lane.abort_request(request_id)]
        for prefix in list(self._waiting):
            if prefix.rows[0].request.request_id == request_id:
                gone += prefix.rows
                self._waiting.remove(prefix)
        self._finished += [row.finished(FinishReason.ABORTED) for row in gone]
        self._drop_parked(row.turn_of for row in gone if row.turn_of is not None)

    def end_episode(self, episode: str) -> None:
        """Gives up what is parked of an episode; its requests that are decoded go on.

        Episodes that are never ended so cost no more than room: the oldest give way to others.
        """
        for lane in self._lanes:
            lane.parking.drop_episode(episode)

    @property
    def parked(self) -> int:
        """Completions of episodes whose keys and values are kept for a next turn."""
        return sum(len(lane.parking) for lane in self._lanes)

    @property
    def parked_bytes(self) -> int:
        """Of the same, over all devices."""
        g = self.programs.geometry
        return self.parked * self.programs.pool_bytes() * self.spec.layout.tensor // g.entries

    def _request_ids(self) -> set[str]:
        """Of the requests that have a row which has not ended."""
        waiting = (row for prefix in self._waiting for row in prefix.rows)
        in_lanes = (row for lane in self._lanes for row in lane.unfinished_rows())
        return {row.request.request_id for rows in (waiting, in_lanes) for row in rows}

    @property
    def _stop_sets(self) -> int:
        return 1 if self._stops is None else len(self._stops.starts)

    def _start_state(self, request: DecodeRequest) -> int:
        return 0 if self._stops is None else int(self._stops.starts[request.stop_set])

    def _prefill(self) -> list[jax.Array]:
        """Starts prefill calls for waiting prompts; few while most slots decode, more else."""
        in_slots = sum(lane.in_slots for lane in self._lanes)
        idle = 2 * in_slots < self.spec.lanes * self.spec.slots
        markers = []
        for _ in range(PREFILLS_WHEN_IDLE if idle else 1):
            self._assign_waiting()
            marker = self._prefill_call()
            if marker is None:
                break
            markers.append(marker)
        return markers

    def _assign_waiting(self) -> None:
        """Gives waiting prompts to the lanes that have the fewest rows."""
        stock = self.programs.geometry.places
        while self._waiting:
            prefix = self._next_waiting()
            open_ = [lane for lane in self._lanes if lane.stock < stock]
            holding = [lane for lane in open_ if prefix.turn_of in lane.parking]
            fitting = holding or [lane for lane in open_ if lane.has_entry]
            if not fitting:
                return
            self._waiting.remove(prefix)
            min(fitting, key=lambda lane: lane.stock + lane.queued).add_prefix(prefix)
            self.counts.prompts += 1
            self.counts.reused_tokens += prefix.prefilled
            self.counts.prefilled_tokens += len(prefix.token_ids) - 1 - prefix.prefilled
            if prefix.turn_of is not None and not holding:
                self._drop_parked([prefix.turn_of])

    def _next_waiting(self) -> Prefix:
        """Episodes that are parked come first: the sooner they end, the fewer are parked at once
        and the fewer are given up before their next turn.
        """
        if self.programs.geometry.parked:
            for prefix in self._waiting:
                if any(prefix.turn_of in lane.parking for lane in self._lanes):
                    return prefix
        return self._waiting[0]

    def _drop_parked(self, turns: Iterable[tuple[str, int]]) -> None:
        for turn_of in turns:
            for lane in self._lanes:
                lane.parking.drop(turn_of)

    def _prefill_call(self) -> jax.Array | None:
        g = self.programs.geometry
        longest = g.chunks[-1]
        due = [chunk for lane in self._lanes for chunk in lane.chunks_due(longest)]
        if not due:
            return None
        start, length = due[0]
        size = min(size for size in g.chunks if size >= length)
        later = start > 0
        # Shorter chunks than the size below would be padded to twice their length.
        below = max((other for other in g.chunks if other < size), default=0)

        def fits(start: int, length: int) -> bool:
            return below < length <= size and (start > 0) == later

        prompts = g.chunk_prompts(size)
        pieces = [lane.take_pieces(fits, prompts, longest) for lane in self._lanes]
        marker = self.device.prefill(pieces, size, later)
        self.counts.prefill_calls += 1
        return marker

    def _dispatch(self, markers: list[jax.Array], *, closed: bool = False) -> bool:
        """Starts a segment, if a row is in a slot or queued; returns whether one was started.

        Args:
            closed: no row enters a slot, so that the segment need not end early for one.
        """
        if not any(lane.queued for lane in self._lanes):
            if markers:
                with self._clock.phase("prefill"):
                    jax.block_until_ready(markers)
            return False
        # The host has not seen the tokens of segments under way: it allows for all they can draw.
        steps = self.spec.segment_tokens * (len(self._flights) + 1)
        needed = max(lane.needed_width(steps) for lane in self._lanes)
        more = not closed and (self._waiting or any(lane.chunks_due(1) for lane in self._lanes))
        # Prompts are left that the device does not know of: a segment whose slots run empty should
        # end early, so that the host can prefill and queue them.
        floor = math.ceil(BUSY_SHARE * self.spec.slots) if more else 0
        tokens = self.device.segment([lane.table for lane in self._lanes], needed, floor)
        self._flights.append(_Flight(tokens, self.version, markers))
        self.counts.segments += 1
        return True

    def _collect(self, account: str | None) -> None:
        """Waits for the oldest segment and gives its tokens to their rows."""
        flight = self._flights.popleft()
        with self._clock.phase(account or "prefill"):
            jax.block_until_ready(flight.prefilled)
        with self._clock.phase(account or "decode"):
            tokens = jax.device_get(flight.tokens)
        slots = self.spec.slots
        for index, lane in enumerate(self._lanes):
            steps = int(tokens.steps[index])
            mine = np.s_[:steps, index * slots : (index + 1) * slots]
            arrays = [array[mine] for array in tokens[:-1]]
            self._finished += lane.collect(*arrays, version=flight.version)
            self.counts.tokens += int(np.count_nonzero(arrays[0] >= 0))
        most = int(tokens.steps.max())
        self.counts.token_steps += most
        self.counts.slot_steps += most * slots * len(self._lanes)

    def _collect_all(self) -> None:
        while self._flights:
            self._collect(None)

    def _finish_slots(self) -> None:
        """Decodes the rows that are in a slot to their end; no other row enters one."""
        for lane in self._lanes:
            lane.close_queue()
        while any(lane.in_slots for lane in self._lanes):
            self._dispatch([], closed=True)
            self._collect_all()

    def _requeue(self, rows: list[Row]) -> None:
        """Puts rows that have not ended before the waiting ones, without their KV entries."""
        goes_on = self.limits.on_swap is OnSwap.CONTINUE
        for row in rows:
            if row.aborted:
                self._finished.append(row.finished(FinishReason.ABORTED))
                continue
            state = self._start_state(row.request)
            if not goes_on:
                row.discard_tokens()
            elif self._stops is not None:
                for token in (token for part in row.token_ids for token in part):
                    state = int(self._stops.next_SV[state, token])
            row.stop_state = state
        self._waiting.extendleft(
            reversed(group_by_prefix([row for row in rows if not row.aborted]))
        )
