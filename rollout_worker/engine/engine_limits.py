"""The limits of an engine, the checks against them, and the array sizes that follow from them."""

import dataclasses
from typing import Literal

import jax
import numpy as np

from models.transformer import Params
from rollout_worker.engine.decode_programs import Geometry
from rollout_worker.engine.decode_request import DecodeRequest, OnSwap, SamplingSettings
from rollout_worker.engine.kv_cache import NARROWEST, check_geometry, doubling_sizes
from rollout_worker.engine.prefill import chunk_sizes
from rollout_worker.engine.slots import DecodeSpec
from rollout_worker.engine.stop_strings import StopAutomaton

PLACES_PER_SLOT = 4
"""Rows in the device's table: a slot can finish several short completions within a segment."""
KERNEL_TILE = 128
"""The Pallas kernel reads the cache in blocks of this many columns; the width is a multiple."""
POOL_TILE = 16
"""Columns of a tile of a TPU's memory; the width of the prefix pool is a multiple."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The largest requests that an engine accepts, and its memory for them."""

    max_prompt_tokens: int
    max_new_tokens: int
    cache_tokens: int
    """Columns of the widest cache."""
    goes_on: bool = False
    """Whether a prompt may hold completions of before, as the later turns of an episode do: then it
    is bounded by the cache alone."""
    prefill_tokens: int = 512
    """Of one prefill call, padding included; a longer prompt takes several."""
    prefixes: int | None = None
    """Entries of a lane's prefix pool; None takes half of the slots."""
    parked: int = 0
    """Further entries, in which a lane keeps episodes between their turns."""
    stop_ids: int = 8
    """Most stop ids of a request."""
    invariant: bool = False
    """Keep one cache width: the bits of a row do not depend on what else is decoded."""
    on_swap: OnSwap = OnSwap.FINISH
    compile_budget: int | None = None
    """Programs that may be compiled; None takes the count that the sizes above can need."""
    over_budget: Literal["warn", "error"] = "warn"


def check_params(params: Params, expected: Params) -> None:
    """Refuses a tree that is not the inference copy which the programs take.

    Raises:
        ValueError: naming the difference.
    """
    if jax.tree.structure(params) != jax.tree.structure(expected):
        raise ValueError("the policy's names are not those of the engine's model")
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, wanted), leaf in zip(leaves, jax.tree.leaves(params), strict=True):
        if (leaf.shape, leaf.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"policy{jax.tree_util.keystr(path)} is {leaf.dtype} {list(leaf.shape)}, the "
                f"engine takes {wanted.dtype} {list(wanted.shape)}"
            )


def check_request(
    request: DecodeRequest, spec: DecodeSpec, limits: EngineLimits, stop_sets: int
) -> None:
    """Refuses what an engine cannot decode.

    Args:
        request: with its stop ids filled in.

    Raises:
        ValueError: with the request's name, the numbers and the rule.
    """
    about = f"request {request.request_id}"
    _check_kinds(request, about)
    for name, value, most in (
        ("prompt tokens", len(request.token_ids), _longest_prompt(limits)),
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


def _longest_prompt(limits: EngineLimits) -> int:
    return limits.cache_tokens - 1 if limits.goes_on else limits.max_prompt_tokens


def _check_kinds(request: DecodeRequest, about: str) -> None:
    """Refuses values that the device's arrays cannot hold unchanged."""
    if not isinstance(request.request_id, str):
        raise ValueError(f"{about}: request_id must be text")
    if not isinstance(request.episode, str | None):
        raise ValueError(f"{about}: episode must be text or None, got {request.episode!r}")
    token_ids, key_data = request.token_ids, request.key_data
    if not (isinstance(token_ids, np.ndarray) and token_ids.ndim == 1 and _is_whole(token_ids)):
        raise ValueError(f"{about}: token_ids must be a one-dimensional array of integers")
    if not (
        isinstance(key_data, np.ndarray) and key_data.shape == (2,) and key_data.dtype == np.uint32
    ):
        raise ValueError(f"{about}: key_data must be uint32 [2], as jax.random.key_data gives it")
    if not isinstance(request.sampling, SamplingSettings):
        raise ValueError(f"{about}: sampling must be SamplingSettings")
    if not request.samples:
        raise ValueError(f"{about}: samples is empty: ask for at least one completion")
    if len(set(request.samples)) < len(request.samples):
        raise ValueError(f"{about}: samples must differ, got {request.samples}")
    numbers = {
        "prompt_id": request.prompt_id,
        "epoch": request.epoch,
        "max_new_tokens": request.max_new_tokens,
        "stop_set": request.stop_set,
        **{f"samples[{place}]": sample for place, sample in enumerate(request.samples)},
        **{f"stop_ids[{place}]": stop for place, stop in enumerate(request.stop_ids or ())},
    }
    for name, value in numbers.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not 0 <= value < 2**31:
            raise ValueError(f"{about}: {name} must be a whole number below 2**31, got {value!r}")


def _is_whole(array: np.ndarray) -> bool:
    return np.issubdtype(array.dtype, np.integer)


def geometry_of(
    spec: DecodeSpec, limits: EngineLimits, stops: StopAutomaton | None = None
) -> Geometry:
    """The sizes of the engine's arrays.

    Raises:
        ValueError: if the limits do not fit the cache or the model.
    """
    _check_limits(spec, limits)
    check_geometry(
        prompt_tokens=limits.max_prompt_tokens,
        completion_tokens=limits.max_new_tokens,
        cache_tokens=limits.cache_tokens,
        max_position_embeddings=spec.layout.config.max_position_embeddings,
    )
    goes_on = limits.on_swap is OnSwap.CONTINUE
    prefix = max(1, (limits.cache_tokens if goes_on else _longest_prompt(limits)) - 1)
    pool_width = prefix
    if spec.attention_impl.startswith("pallas"):
        # The kernel reads no more than each row holds: it needs no narrower cache.
        widths = (-(-limits.cache_tokens // KERNEL_TILE) * KERNEL_TILE,)
        # XLA for TPU copies a whole pool twice in each segment where it has no whole tiles.
        pool_width = -(-prefix // POOL_TILE) * POOL_TILE
    elif limits.invariant:
        # A compiler orders the sums of attention by their length, which is the width.
        widths = (limits.cache_tokens,)
    else:
        widths = doubling_sizes(NARROWEST, limits.cache_tokens)
    return Geometry(
        places=PLACES_PER_SLOT * spec.slots,
        prefixes=max(1, spec.slots // 2) if limits.prefixes is None else limits.prefixes,
        parked=limits.parked,
        longest_prefix=prefix,
        pool_width=pool_width,
        widths=widths,
        chunks=chunk_sizes(min(limits.prefill_tokens, prefix)),
        chunk_tokens=limits.prefill_tokens,
        stop_ids=limits.stop_ids,
        stop_states=0 if stops is None else len(stops.next_SV),
    )


def _check_limits(spec: DecodeSpec, limits: EngineLimits) -> None:
    sizes = {
        "slots": spec.slots,
        "segment_tokens": spec.segment_tokens,
        "valid_vocab": spec.valid_vocab,
        "max_prompt_tokens": limits.max_prompt_tokens,
        "max_new_tokens": limits.max_new_tokens,
        "cache_tokens": limits.cache_tokens,
        "prefill_tokens": limits.prefill_tokens,
        "stop_ids": limits.stop_ids,
        "prefixes": 1 if limits.prefixes is None else limits.prefixes,
    }
    for name, value in sizes.items():
        if not isinstance(value, int | np.integer) or not 1 <= value < 2**31:
            raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
    if not isinstance(limits.parked, int | np.integer) or not 0 <= limits.parked < 2**31:
        raise ValueError(f"parked must be a whole number, at least 0, got {limits.parked!r}")
    vocabulary = spec.layout.published.vocab_size
    if spec.valid_vocab > vocabulary:
        raise ValueError(
            f"valid_vocab={spec.valid_vocab} must be at most the model's {vocabulary} ids"
        )
    if not isinstance(limits.on_swap, OnSwap):
        raise ValueError(f"on_swap must be one of {list(OnSwap)}, got {limits.on_swap!r}")
    if limits.over_budget not in ("warn", "error"):
        raise ValueError(f"over_budget must be warn or error, got {limits.over_budget!r}")
