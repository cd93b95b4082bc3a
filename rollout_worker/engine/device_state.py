"""The arrays of an engine on its devices, and the calls that change them.

Three things stay on the devices between calls: the policy, the slots with their KV cache, and the
prefix pool. The programs take slots and pool as donated arguments, so that they are updated in
place and no second copy of a cache exists. The table of rows and the prompts' tokens are small:
the host sends them with each call.

Every call returns before the devices have run it: JAX queues the programs of a device in the order
of the calls.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from models.transformer import Params
from rollout_worker.engine.decode_programs import CHUNK, LATER, WIDTH, DecodePrograms
from rollout_worker.engine.kv_cache import LayerCache
from rollout_worker.engine.prefill import PromptPiece, pack_chunks
from rollout_worker.engine.program_cache import ProgramCache
from rollout_worker.engine.sampling import Sampling
from rollout_worker.engine.slots import Rows, SegmentTokens, Slots
from rollout_worker.engine.stop_strings import StopAutomaton

SETTINGS = ("temperature", "top_k", "top_p", "min_p")


class DeviceState:
    """Owns policy, slots and prefix pool of all lanes."""

    def __init__(
        self, programs: DecodePrograms, compiled: ProgramCache, stops: StopAutomaton | None
    ):
        self._programs = programs
        self._compiled = compiled
        self._stop_table = None if stops is None else self._put_stops(stops)
        self._arrays: tuple[Params, Slots, list[LayerCache]] | None = None
        self.resizes = 0

    def load_policy(self, params: Params) -> None:
        """Makes a policy the current one, and slots and pool anew: all zero."""
        self._arrays = None  # the old arrays are freed before the new ones are made
        slots, pool = self._compiled.get_program("empty", {}, self._programs.compile_empty)()
        self._arrays = params, slots, pool

    def prefill(self, pieces: Sequence[Sequence[PromptPiece]], size: int, later: bool) -> jax.Array:
        """Starts one prefill call, with the chunks of every lane.

        Returns:
            a marker that is ready when they are in the pool.
        """
        params, slots, pool = self._loaded
        g = self._programs.geometry
        packed = pack_chunks(pieces, g.chunk_prompts(size), size, g.entries)
        chunks = jax.device_put(packed, self._programs.by_lane)
        program = self._compiled.get_program(
            "prefill",
            {CHUNK: size, LATER: int(later)},
            lambda: self._programs.compile_prefill(size, later=later),
        )
        pool, marker = program(params, pool, chunks)
        self._arrays = params, slots, pool
        return marker

    def segment(
        self, tables: Sequence[dict[str, np.ndarray]], needed_width: int, floor: int
    ) -> SegmentTokens:
        """Starts a segment.

        Args:
            tables: of every lane, as `Lane.table`; copied.
            needed_width: columns that may be written. The cache is made wider where it must be,
                and narrower where half of it is enough.
            floor: as `slots.segment` takes it.
        """
        params, slots, pool = self._loaded
        now = _width(slots)
        width = min(one for one in self._programs.geometry.widths if one >= needed_width)
        if now < width or 2 * width <= now:
            slots = self._resized(slots, width)
        else:
            width = now
        table = {name: np.concatenate([each[name] for each in tables]) for name in tables[0]}
        floors = np.full(len(tables), floor, np.int32)
        rows, floors = jax.device_put((_as_rows(table), floors), self._programs.by_lane)
        program = self._compiled.get_program(
            "segment", {WIDTH: width}, lambda: self._programs.compile_segment(width)
        )
        slots, tokens, parked = program(params, slots, rows, pool, self._stop_table, floors)
        self._arrays = params, slots, pool if parked is None else parked
        return tokens

    def narrow_cache(self) -> None:
        """Makes the cache as narrow as it can be; no row may be in a slot.

        Every pass over the same requests then begins with the same width, and compiles no program
        that the first pass did not.
        """
        params, slots, pool = self._loaded
        narrowest = self._programs.geometry.widths[0]
        if _width(slots) > narrowest:
            self._arrays = params, self._resized(slots, narrowest), pool

    @property
    def loaded(self) -> bool:
        """Whether there is a policy."""
        return self._arrays is not None

    @property
    def _loaded(self) -> tuple[Params, Slots, list[LayerCache]]:
        if self._arrays is None:
            raise RuntimeError("the engine has no policy: call swap_policy before step")
        return self._arrays

    def _resized(self, slots: Slots, width: int) -> Slots:
        now = _width(slots)
        program = self._compiled.get_program(
            "resize", {"from": now, "to": width}, lambda: self._programs.compile_resize(now, width)
        )
        self.resizes += 1
        return slots._replace(cache=program(slots.cache))

    def _put_stops(self, stops: StopAutomaton) -> jax.Array:
        V = stops.next_SV.shape[1]
        padding = self._programs.spec.layout.config.vocab_size - V
        # Ids beyond the tokenizer's are never drawn, so their entries do not matter.
        table = np.pad(stops.next_SV, ((0, 0), (0, padding))) if padding > 0 else stops.next_SV
        return jax.device_put(table[:, : V + padding], self._programs.replicated)


def _width(slots: Slots) -> int:
    return slots.cache[0].key_BKSH.shape[2]


def _as_rows(table: dict[str, np.ndarray]) -> Rows:
    sampling: Any = {f"{name}_B": table[f"{name}_R"] for name in SETTINGS}
    others: Any = {name: array for name, array in table.items() if name[:-2] not in SETTINGS}
    return Rows(**others, sampling=Sampling(**sampling))
