"""One engine over random requests, and the time of each of its steps."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode.variants import Variant
from kernels.packed_attention.ops import plan_attention
from models.transformer import Params
from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow, SamplingSettings
from rollout_worker.engine.engine import Engine, EngineCounts
from rollout_worker.engine.engine_limits import EngineLimits
from rollout_worker.engine.layout import Layout
from rollout_worker.engine.slots import DecodeSpec
from services.process.phase_clock import PhaseClock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One `Engine.step`."""

    seconds: float
    token_steps: int
    tokens: int
    prefill_calls: int
    resizes: int
    compilations: int
    finished: int
    """Rows that have ended since the pass began."""
    tokens_so_far: int
    slot_steps_so_far: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """A set of requests, from the first submitted to the last row that ended."""

    seconds: float
    prefill_s: float
    """In which the host waited for prefill."""
    compile_s: float
    counts: EngineCounts
    turns: list[Turn]
    rows: list[FinishedRow]

    @property
    def compilations(self) -> int:
        """Programs compiled during the pass."""
        return sum(turn.compilations for turn in self.turns)

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second."""
        return self.counts.tokens / self.seconds


def decode_spec(layout: Layout, variant: Variant, slots: int) -> DecodeSpec:
    """What the programs of a variant are made for.

    Args:
        slots: of all lanes together; a multiple of their number.
    """
    platform = layout.mesh.devices.flat[0].platform
    attention = variant.attention_of(platform, layout.config.head_dim)
    return DecodeSpec(
        layout=layout,
        valid_vocab=layout.published.vocab_size,
        compute_dtype=jnp.dtype(variant.compute_dtype),
        attention_dtype=attention.operand_dtype,
        attention_impl=attention.impl,
        prefill_attention=plan_attention("auto", platform),
        slots=slots // layout.mesh.shape["data"],
        segment_tokens=variant.segment_tokens if variant.loop == "while" else 1,
        wide_cache=platform == "cpu",
    )


class Bench:
    """One engine with its clock."""

    def __init__(
        self,
        layout: Layout,
        params: Params,
        variant: Variant,
        limits: EngineLimits,
        *,
        slots: int,
        seed: int,
    ):
        """Args:
        slots: of all lanes together; a multiple of their number.
        seed: of the draws.
        """
        self.slots = slots
        self._clock = PhaseClock()
        self._key_data = np.asarray(jax.random.key_data(jax.random.key(seed)))
        self.engine = Engine(
            decode_spec(layout, variant, slots),
            limits,
            loop="python" if variant.loop == "python" else "while",
            stop_ids=(),
            clock=self._clock,
        )
        self.engine.swap_policy(params, 0)

    def requests(
        self,
        prompt_QT: np.ndarray,
        new_tokens: Sequence[int] | np.ndarray,
        *,
        samples: int = 1,
        temperature: float = 1.0,
    ) -> list[DecodeRequest]:
        """One request per prompt, that nothing ends but its number of tokens.

        Args:
            prompt_QT: int32.
            new_tokens: of each.
            samples: completions of each.
        """
        return [
            DecodeRequest(
                request_id=str(place),
                token_ids=token_ids,
                prompt_id=place,
                epoch=0,
                samples=tuple(range(samples)),
                max_new_tokens=int(new),
                key_data=self._key_data,
                sampling=SamplingSettings(temperature=temperature),
                stop_ids=(),
            )
            for place, (token_ids, new) in enumerate(zip(prompt_QT, new_tokens, strict=True))
        ]

    def run(self, requests: Sequence[DecodeRequest], *, batch: int | None = None) -> Pass:
        """Decodes requests to their end.

        Args:
            batch: number submitted at a time, the next ones when the last of them has ended; None
                submits all at once.
        """
        self.engine.counts = EngineCounts()
        self._clock.take_timing()
        turns, rows = [], []
        started = time.perf_counter()
        for first in range(0, len(requests), batch or len(requests)):
            self.engine.submit_requests(requests[first : first + (batch or len(requests))])
            while self.engine.pending:
                turns.append(self._turn(rows))
        seconds = time.perf_counter() - started
        phases = self._clock.take_timing().seconds
        return Pass(
            seconds=seconds,
            prefill_s=phases["prefill"],
            compile_s=phases["compile"],
            counts=self.engine.counts,
            turns=turns,
            rows=rows,
        )

    def _turn(self, rows: list[FinishedRow]) -> Turn:
        before = dataclasses.replace(self.engine.counts)
        programs, resizes = len(self.engine.compilations), self.engine.resizes
        started = time.perf_counter()
        rows += self.engine.step()
        seconds = time.perf_counter() - started
        now = self.engine.counts
        return Turn(
            seconds=seconds,
            token_steps=now.token_steps - before.token_steps,
            tokens=now.tokens - before.tokens,
            prefill_calls=now.prefill_calls - before.prefill_calls,
            resizes=self.engine.resizes - resizes,
            compilations=len(self.engine.compilations) - programs,
            finished=len(rows),
            tokens_so_far=now.tokens,
            slot_steps_so_far=now.slot_steps,
        )

    def latest_programs(self, count: int) -> list[str]:
        """The last programs that were compiled, each with the size that made it necessary."""
        compiled = self.engine.compilations
        return [f"{one.program} ({one.because})" for one in compiled[len(compiled) - count :]]

    def programs_report(self) -> dict[str, Any]:
        """What was compiled, why, and what it needs of a device's memory."""
        compilations = [dataclasses.asdict(one) for one in self.engine.compilations]
        return {
            "compilations": len(compilations),
            "compile_s": sum(one["seconds"] for one in compilations),
            "compiled": compilations,
            "peak_bytes": self.engine.peak_bytes(),
        }


def full_turns(one: Pass, slots: int) -> list[Turn]:
    """Turns that did nothing but token steps with every slot busy, before any row had ended."""
    found = []
    quiet_before = False
    for turn in one.turns:
        # What a turn dispatches may finish in the next one.
        quiet = not (turn.prefill_calls or turn.resizes or turn.compilations)
        full = turn.token_steps and turn.tokens == turn.token_steps * slots
        if quiet and quiet_before and full and not turn.finished:
            found.append(turn)
        quiet_before = quiet
    return found


def interleaved(runs: Sequence[Callable[[], Pass]], repeat: int) -> list[list[Pass]]:
    """The passes of each, run in turn (A B A B ..), so that a drift of the machine meets all."""
    found: list[list[Pass]] = [[] for _ in runs]
    for _ in range(repeat):
        for run, own in zip(runs, found, strict=True):
            own.append(run())
    return found
