"""From a configuration to an engine: lanes and slots per device, and the attention to use.

Sizes alone decide, so that a plan without devices, a check without a TPU and a worker get the same
programs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from kernels import choose
from kernels.decode_attention.ops import resolve
from kernels.decode_attention.pallas_tpu import LANES
from kernels.packed_attention.ops import plan_attention
from models.adapter import AdapterShape
from models.config import ModelConfig
from models.tokenizer import Tokenizer
from rollout_worker.config.rollout_config import RolloutConfig
from rollout_worker.engine.decode_programs import DecodePrograms
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.engine_limits import EngineLimits, geometry_of
from rollout_worker.engine.layout import AXES, Layout, check_tensor_parallel, make_mesh
from rollout_worker.engine.slots import DecodeSpec
from rollout_worker.engine.stop_strings import StopAutomaton, build_stop_automaton, token_bytes
from services.process.phase_clock import PhaseClock

STOP_STRINGS_SET = 1
"""Stop set of requests that end with `rollout.stop_strings`; set 0 has none."""
MOST_STOP_IDS = 8
"""Stop ids of a row that the engine has room for, if the tokenizer does not have more."""


class DecodeAttention(NamedTuple):
    """The attention of a new token over the cache."""

    impl: str
    """One of `kernels.choose.IMPLEMENTATIONS`."""
    operand_dtype: jnp.dtype


def choose_attention(
    attention: str, *, compute_dtype: jnp.dtype, platform: str, head_dim: int
) -> DecodeAttention:
    """The attention that `auto`, `bf16`, `f32` or `pallas` selects on a platform.

    Raises:
        ValueError: if it selects a kernel that does not exist.
    """
    if attention in ("bf16", "f32"):
        wide = attention == "f32"
        return DecodeAttention(choose.XLA, jnp.dtype("float32" if wide else "bfloat16"))
    if attention == "pallas" and platform == "gpu":
        raise ValueError(
            "attention=pallas: there is no such kernel for platform gpu; set it to auto, bf16 or "
            "f32"
        )
    if attention == "pallas" and platform == "tpu" and head_dim % LANES:
        raise ValueError(
            f"attention=pallas: the kernel takes head sizes that are multiples of {LANES}, the "
            f"model's is {head_dim}; set it to auto, bf16 or f32"
        )
    if attention == "auto" and platform == "cpu":
        return DecodeAttention(choose.XLA, jnp.dtype("float32"))
    return DecodeAttention(resolve(attention, platform, head_size=head_dim), compute_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """Everything that determines an engine's programs, except devices and tokenizer."""

    rollout: RolloutConfig
    model: ModelConfig
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    weights_dtype: str
    """Of the published policy versions."""
    several_turns: bool = False
    """Whether an environment answers, so that a prompt may hold earlier turns."""
    adapter: AdapterShape | None = None
    """Of the adapter that every version is; None where versions are whole models."""

    def lanes(self, devices: int) -> int:
        """Copies of the policy that a worker's devices hold, each with its own slots.

        Raises:
            ValueError: if devices, slots or prefixes cannot be divided so.
        """
        decode = self.rollout.decode
        if devices % decode.tensor:
            raise ValueError(
                f"rollout.decode.tensor={decode.tensor} must divide the {devices} device(s) of a "
                f"worker: set it to one of {_divisors(devices)}"
            )
        lanes = devices // decode.tensor
        for name in ("slots", "prefixes", "parked"):
            count = getattr(decode, name)
            if count is not None and count % lanes:
                raise ValueError(
                    f"rollout.decode.{name}={count} must be a multiple of the {lanes} lanes of a "
                    f"worker ({devices} device(s) / rollout.decode.tensor={decode.tensor}): set "
                    f"it to {-(-count // lanes) * lanes}"
                )
        return lanes

    @property
    def _parked(self) -> int:
        """Episodes that all lanes keep between their turns."""
        rollout, decode = self.rollout, self.rollout.decode
        if not self.several_turns:
            return 0
        if decode.parked is not None:
            return decode.parked
        return rollout.worker_groups * rollout.completions_per_prompt

    @property
    def stop_set(self) -> int:
        """Stop set of every request of the run."""
        return STOP_STRINGS_SET if self.rollout.stop_strings else 0

    @property
    def attention(self) -> DecodeAttention:
        """The attention that `rollout.decode.attention` selects on this platform.

        Raises:
            ValueError: if it selects a kernel that does not exist.
        """
        decode = self.rollout.decode
        try:
            return choose_attention(
                decode.attention,
                compute_dtype=jnp.dtype(decode.compute_dtype),
                platform=self.platform,
                head_dim=self.model.head_dim,
            )
        except ValueError as error:
            raise ValueError(f"rollout.decode.{error}") from error

    @property
    def copy_dtype(self) -> np.dtype:
        """Of the inference copy: it represents every published value and every product's operand.

        The digest is computed from the copy, so no published value may be rounded.
        """
        wide = "float32" in (self.weights_dtype, self.rollout.decode.compute_dtype)
        return np.dtype(np.float32) if wide else np.dtype(jnp.bfloat16)

    def abstract_mesh(self, devices: int) -> Mesh:
        """A mesh over this number of devices that need not exist; usable for sizes only."""
        shape = (self.lanes(devices), self.rollout.decode.tensor)
        stand_in: Any = AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * 2)
        return stand_in

    def mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        """The mesh over a worker's devices."""
        return make_mesh(devices, self.lanes(len(devices)), self.rollout.decode.tensor)

    def spec(self, mesh: Mesh, *, valid_vocab: int) -> DecodeSpec:
        """The constants of the programs."""
        decode, model = self.rollout.decode, self.model
        try:
            check_tensor_parallel(
                model.num_heads, model.num_kv_heads, model.intermediate_size, decode.tensor
            )
        except ValueError as error:
            raise ValueError(f"rollout.decode.{error}") from error
        attention = self.attention
        return DecodeSpec(
            layout=Layout(model, mesh, self.copy_dtype, self.adapter),
            valid_vocab=valid_vocab,
            compute_dtype=jnp.dtype(decode.compute_dtype),
            attention_dtype=attention.operand_dtype,
            attention_impl=attention.impl,
            prefill_attention=plan_attention("auto", self.platform),
            slots=decode.slots // mesh.shape["data"],
            segment_tokens=decode.segment_tokens,
            wide_cache=self.platform == "cpu",
        )

    def limits(self, lanes: int, *, stop_ids: int = MOST_STOP_IDS) -> EngineLimits:
        """The engine's limits; those of slots and prefixes are per lane."""
        rollout, decode = self.rollout, self.rollout.decode
        return EngineLimits(
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_new_tokens=rollout.max_completion_tokens,
            cache_tokens=rollout.cache_tokens,
            goes_on=self.several_turns,
            prefill_tokens=decode.prefill_tokens,
            prefixes=None if decode.prefixes is None else decode.prefixes // lanes,
            parked=-(-self._parked // lanes),
            stop_ids=max(MOST_STOP_IDS, stop_ids),
            invariant=decode.invariant,
            compile_budget=decode.compile_budget,
            over_budget=decode.over_budget,
        )

    def programs(self, mesh: Mesh, *, valid_vocab: int | None = None) -> DecodePrograms:
        """The engine's programs and array sizes without an engine, and without stop strings.

        Args:
            valid_vocab: size of the tokenizer's vocabulary; None takes the model's.
        """
        spec = self.spec(mesh, valid_vocab=valid_vocab or self.model.vocab_size)
        return DecodePrograms(spec, geometry_of(spec, self.limits(spec.lanes)))

    def engine(
        self,
        devices: Sequence[jax.Device],
        tokenizer: Tokenizer,
        *,
        clock: PhaseClock,
        warn: Callable[[str], None],
    ) -> Engine:
        """An engine without a policy; `Engine.swap_policy` gives it the first.

        Raises:
            ValueError: if the configuration does not fit devices, model or tokenizer.
        """
        mesh = self.mesh(devices)
        stop_ids = () if self.rollout.ignore_stop_tokens else tuple(sorted(tokenizer.stop_ids))
        valid_vocab = min(tokenizer.vocab_size, self.model.vocab_size)
        return Engine(
            self.spec(mesh, valid_vocab=valid_vocab),
            self.limits(mesh.shape["data"], stop_ids=len(stop_ids)),
            loop=self.rollout.decode.loop,
            stop_ids=stop_ids,
            clock=clock,
            stops=stop_automaton(tokenizer, self.rollout.stop_strings),
            warn=warn,
        )


def stop_automaton(tokenizer: Tokenizer, stop_strings: Sequence[str]) -> StopAutomaton | None:
    """The automaton with the stop strings as STOP_STRINGS_SET; None if there are none.

    Raises:
        ValueError: if the bytes of the tokenizer's tokens are not known.
    """
    if not stop_strings:
        return None
    return build_stop_automaton(token_bytes(tokenizer), [(), tuple(stop_strings)])


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
