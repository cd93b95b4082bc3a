"""The decode engine of one worker: batches of prompts through compiled programs.

It knows token ids and keys, never text, Ray or gRPC. A batch always has `batch_rows` rows, filled
up where prompts run out, so that each prompt bucket compiles once.

Dimension key: as in decode.py.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from models.transformer import Params
from rollout_worker.decode import (
    Completions,
    DecodeSpec,
    RowInputs,
    advance,
    begin,
    decode_while,
    pad_left,
    prefill,
    unfinished,
)
from services.phase_clock import PhaseClock

SHORTEST_BUCKET = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to complete; the ids enter the random keys."""

    token_ids: np.ndarray
    """int32 [<= max_prompt_tokens]."""
    prompt_id: int
    epoch: int


class BatchShapes(NamedTuple):
    """Arguments of a batch's programs, beside the parameters: shape, dtype and sharding."""

    prompt_PT: jax.ShapeDtypeStruct
    length_P: jax.ShapeDtypeStruct
    rows: RowInputs
    base_key: jax.ShapeDtypeStruct
    temperature: jax.ShapeDtypeStruct


def prompt_buckets(max_prompt_tokens: int) -> tuple[int, ...]:
    """Padded prompt lengths: doubling up to the longest allowed."""
    buckets = [max_prompt_tokens]
    while buckets[0] // 2 >= SHORTEST_BUCKET:
        buckets.insert(0, buckets[0] // 2)
    return tuple(buckets)


class Engine:
    """Owns the compiled programs; parameters are passed in, so a swap is the caller's."""

    def __init__(
        self,
        spec: DecodeSpec,
        *,
        batch_rows: int,
        max_prompt_tokens: int,
        loop: str,
        devices: Sequence[jax.Device],
        clock: PhaseClock,
    ):
        mesh = jax.make_mesh(
            (len(devices),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
        )
        self._spec = spec
        self._batch_rows = batch_rows
        self._buckets = prompt_buckets(max_prompt_tokens)
        self._loop = loop
        self._clock = clock
        self._by_row = NamedSharding(mesh, PartitionSpec("rows"))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        """Where the parameters must lie."""
        self._programs: dict[tuple, Callable] = {}

    @property
    def compilations(self) -> int:
        return len(self._programs)

    def batch_prompts(self, samples: int) -> int:
        """How many prompts one call takes, each with `samples` completions.

        Raises:
            ValueError: if rows do not divide by samples, or prompts by the worker's devices.
        """
        devices = self._by_row.mesh.size
        if self._batch_rows % samples or (self._batch_rows // samples) % devices:
            raise ValueError(
                f"decode.batch_rows={self._batch_rows} must be a multiple of {samples} completions "
                f"x {devices} devices of the worker = {samples * devices}"
            )
        return self._batch_rows // samples

    def generate(
        self,
        params: Params,
        requests: Sequence[Request],
        samples: int,
        *,
        base_key: jax.Array,
        temperature: float,
        account: str | None = None,
    ) -> Completions:
        """Completes up to `batch_prompts(samples)` prompts, `samples` times each.

        Args:
            params: layers listed, placed at `replicated`.
            base_key: key of the run's seed or of another stream.
            temperature: 0 takes the most likely tokens.
            account: ledger phase for all of it, instead of `prefill` and `decode`.

        Returns:
            rows of the requests in order, a request's samples adjacent.
        """
        P = self.batch_prompts(samples)
        if not 0 < len(requests) <= P:
            raise ValueError(f"a batch takes 1 to {P} prompts, got {len(requests)}")
        padded = list(requests) + [requests[0]] * (P - len(requests))
        longest = max(len(request.token_ids) for request in requests)
        fitting = [T for T in self._buckets if T >= longest]
        if not fitting:
            raise ValueError(
                f"a prompt of {longest} tokens exceeds max_prompt_tokens={self._buckets[-1]}"
            )
        prompt_PT, length_P = pad_left(
            [request.token_ids for request in padded], fitting[0], self._spec.pad_id
        )
        rows = RowInputs(
            prompt_id_B=jnp.repeat(jnp.array([r.prompt_id for r in padded]), samples),
            epoch_B=jnp.repeat(jnp.array([r.epoch for r in padded]), samples),
            sample_index_B=jnp.tile(jnp.arange(samples), P),
            filler_B=jnp.arange(P * samples) >= len(requests) * samples,
        )
        prompt_PT, length_P, rows = jax.device_put((prompt_PT, length_P, rows), self._by_row)
        base_key, temperature_ = jax.device_put(
            (base_key, jnp.float32(temperature)), self.replicated
        )

        prefilled = self._run(account or "prefill", prefill, params, prompt_PT, length_P)
        decode = self._decode_while if self._loop == "while" else self._decode_python
        state = decode(account or "decode", params, prefilled, rows, base_key, temperature_)
        kept = len(requests) * samples
        tokens, logprobs, length, stopped = jax.device_get(
            (state.tokens_BN, state.logprobs_BN, state.length_B, state.stopped_B)
        )
        return Completions(
            tokens[:kept], logprobs[:kept], length[:kept], stopped[:kept], int(state.count)
        )

    def _decode_while(self, phase, params, prefilled, rows, base_key, temperature):
        return self._run(phase, decode_while, params, prefilled, rows, base_key, temperature)

    def _decode_python(self, phase, params, prefilled, rows, base_key, temperature):
        """One program per token and a look at the device after each: the slow half of an A/B."""
        state, keys_B, pad_B = self._run(phase, begin, prefilled, rows, base_key, temperature)
        while unfinished(state, self._spec):
            state = self._run(phase, advance, params, state, keys_B, pad_B, temperature)
        return state

    def _run(self, phase: str, function: Callable, *arguments):
        """Calls the program for these shapes, compiling it first where it is new."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(arguments))
        program = self._programs.get((function, shapes))
        if program is None:
            with self._clock.phase("compile"):
                program = self.compile(function, *arguments)
            self._programs[function, shapes] = program
        with self._clock.phase(phase):
            return jax.block_until_ready(program(*arguments))

    def compile(self, function: Callable, *arguments) -> jax.stages.Compiled:
        """One of decode.py's functions, for these arguments or shape structs; not run."""
        # A token step overwrites the cache that it was given; a copy of it would be what the slow
        # loop is measured by.
        donated = (1,) if function is advance else ()
        jitted = jax.jit(partial(function, spec=self._spec), donate_argnums=donated)
        return jitted.lower(*arguments).compile()

    def batch_shapes(self, samples: int) -> BatchShapes:
        """What a batch of the longest prompts consists of, as shape structs."""
        P, T = self.batch_prompts(samples), self._buckets[-1]
        by_row = partial(jax.ShapeDtypeStruct, sharding=self._by_row)
        # RowInputs carries shapes here.
        integer_B: Any = by_row((P * samples,), jnp.int32)
        bool_B: Any = by_row((P * samples,), jnp.bool_)
        key = jax.eval_shape(jax.random.key, 0)
        return BatchShapes(
            prompt_PT=by_row((P, T), jnp.int32),
            length_P=by_row((P,), jnp.int32),
            rows=RowInputs(integer_B, integer_B, integer_B, bool_B),
            base_key=jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.replicated),
            temperature=jax.ShapeDtypeStruct((), jnp.float32, sharding=self.replicated),
        )
