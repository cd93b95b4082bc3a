"""What an engine is built for: the longest sequences, the pool, the programs that may be made."""

import dataclasses
from typing import Literal

from rollout_worker.decode_programs import Geometry
from rollout_worker.kv_cache import NARROWEST, check_geometry, doubling
from rollout_worker.prefill import chunk_sizes
from rollout_worker.requests import OnSwap, Request
from rollout_worker.slots import DecodeSpec
from rollout_worker.stop_strings import StopAutomaton

PLACES_PER_SLOT = 4
"""Rows that the device knows of: short completions use up several a segment."""
KERNEL_TILE = 128
"""The cache of a kernel has a multiple of so many columns: what it reads at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What an engine is built for."""

    max_prompt_tokens: int
    max_new_tokens: int
    cache_tokens: int
    """Columns of the widest cache."""
    prefill_tokens: int = 512
    """Of one prefill call, padding included; a longer prompt takes several."""
    prefixes: int | None = None
    """Prompts of a lane that lie prefilled; null derives half of the slots."""
    stop_ids: int = 8
    """Most stop ids of a request."""
    on_swap: OnSwap = OnSwap.FINISH
    compile_budget: int | None = None
    """Programs that may be compiled; null derives what the sizes above can need."""
    over_budget: Literal["warn", "error"] = "warn"


def check_request(request: Request, spec: DecodeSpec, limits: EngineLimits, stop_sets: int) -> None:
    """Refuses what an engine cannot decode.

    Raises:
        ValueError: with the request's name, the numbers and the rule.
    """
    about = f"request {request.request_id}"
    if not request.samples:
        raise ValueError(f"{about}: no completion is asked of it")
    for name, value, most in (
        ("prompt tokens", len(request.token_ids), limits.max_prompt_tokens),
        ("max_new_tokens", request.max_new_tokens, limits.max_new_tokens),
        ("stop ids", len(request.stop_ids or ()), limits.stop_ids),
    ):
        if value > most:
            raise ValueError(
                f"{about}: {value} {name}, but the engine was built for at most {most}"
            )
    check_geometry(
        prompt_tokens=len(request.token_ids),
        completion_tokens=request.max_new_tokens,
        cache_tokens=limits.cache_tokens,
        max_position_embeddings=spec.layout.config.max_position_embeddings,
    )
    vocabulary = spec.layout.published.vocab_size
    low, high = request.token_ids.min(), request.token_ids.max()
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"{about}: token ids must be from 0 to {vocabulary - 1}, got {low} to {high}"
        )
    if not 0 <= request.stop_set < stop_sets:
        raise ValueError(f"{about}: stop_set={request.stop_set}, but the engine has {stop_sets}")


def geometry_of(
    spec: DecodeSpec, limits: EngineLimits, stops: StopAutomaton | None = None
) -> Geometry:
    """The sizes of the engine's arrays.

    Raises:
        ValueError: if the limits do not fit the cache or the model.
    """
    check_geometry(
        prompt_tokens=limits.max_prompt_tokens,
        completion_tokens=limits.max_new_tokens,
        cache_tokens=limits.cache_tokens,
        max_position_embeddings=spec.layout.config.max_position_embeddings,
    )
    goes_on = limits.on_swap is OnSwap.CONTINUE
    pool_width = max(1, (limits.cache_tokens if goes_on else limits.max_prompt_tokens) - 1)
    if spec.attention_impl.startswith("pallas"):
        # The kernel reads no more than each row holds: it needs no narrower cache.
        widths = (-(-limits.cache_tokens // KERNEL_TILE) * KERNEL_TILE,)
    else:
        widths = doubling(NARROWEST, limits.cache_tokens)
    return Geometry(
        places=PLACES_PER_SLOT * spec.slots,
        prefixes=limits.prefixes or max(1, spec.slots // 2),
        pool_width=pool_width,
        widths=widths,
        chunks=chunk_sizes(min(limits.prefill_tokens, pool_width)),
        chunk_tokens=limits.prefill_tokens,
        stop_ids=limits.stop_ids,
        stop_states=0 if stops is None else len(stops.next_SV),
    )
