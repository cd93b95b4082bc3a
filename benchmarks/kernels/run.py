"""Runs a bench on one device: compiles competitors, measures errors, times them in turn."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import random_problems
from benchmarks.compiled_program import (
    TimedCompilation,
    compile_program,
    compiler_report,
    memory_in_use,
    program_sizes,
    whole_bytes,
)
from benchmarks.kernels.case import Case, CompetitorSpec, available_bytes, check_fits
from benchmarks.kernels.competitors import (
    HeadInputs,
    chunk_tokens,
    head_program,
    logits_program,
    make_head_inputs,
    make_logits_inputs,
    without_padding,
)
from benchmarks.kernels.errors import head_errors, logits_errors
from benchmarks.report_file import versions
from benchmarks.timing import step_times, time_interleaved
from kernels.token_logprob.reference import TokenLogprob

ALL, PADDED, VALID = "all", "padded", "valid"
"""Batches: without a mask; with one; and the tokens that count, by themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """Rounds to time, and tokens to compare with float64; any may be 0."""

    iters: int
    warmup: int
    check_tokens: int

    def __post_init__(self):
        for name in ("iters", "warmup", "check_tokens"):
            if getattr(self, name) < 0:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be at least 0, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Competitor:
    """One competitor on one batch."""

    spec: CompetitorSpec
    batch: str
    """ALL, PADDED or VALID."""
    compilation: TimedCompilation

    @property
    def name(self) -> str:
        """Of the implementation, and of the batch where there are several."""
        return str(self.spec) if self.batch == ALL else f"{self.spec} ({self.batch})"


class Competition:
    """The competitors, the arrays they run on, and the gradient accumulator that they share."""

    def __init__(self, case: Case, specs: Sequence[CompetitorSpec], device: jax.Device):
        """Compiles every competitor for shapes alone, then makes the data.

        Raises:
            DoesNotFit: if it does not fit the device's memory.
        """
        self.case = case
        self._accumulator: Any = None
        available = available_bytes(device)
        check_fits(f"{case.shape_text}, inputs and gradients alone,", case.least_bytes, available)
        make = make_logits_inputs if case.hidden is None else make_head_inputs
        shapes = jax.eval_shape(lambda: self._batches(*make(case)))
        self.competitors = [
            Competitor(spec, batch, self._compiled(spec, inputs))
            for spec in specs
            for batch, (inputs, _) in shapes.items()
        ]
        for competitor in self.competitors:
            needed = whole_bytes(program_sizes(competitor.compilation.compiled))
            check_fits(f"{competitor.name} at {case.shape_text}", needed, available)
        self._data: dict[str, Any] = jax.block_until_ready(self._batches(*make(case)))

    def _batches(self, inputs: Any, scored: TokenLogprob) -> dict[str, Any]:
        if not isinstance(inputs, HeadInputs) or inputs.active_N is None:
            return {ALL: (inputs, scored)}
        token_N = jnp.nonzero(inputs.active_N, size=self.case.active_tokens)[0]
        alone = jax.tree.map(lambda leaf: leaf[token_N], scored)
        return {PADDED: (inputs, scored), VALID: (without_padding(inputs, self.case), alone)}

    def _compiled(self, spec, inputs) -> TimedCompilation:
        if self.case.hidden is None:
            return compile_program(logits_program(spec, self.case), inputs)
        accumulator = jax.ShapeDtypeStruct(inputs.head_VD.shape, jnp.float32)
        return compile_program(head_program(spec, self.case), (*inputs, accumulator))

    def clip_shares(self) -> dict[str, float]:
        """Of the whole batch, or of its tokens that count."""
        inputs, scored = next(reversed(self._data.values()))
        data = jax.tree.map(jnp.ravel, inputs.data)
        return random_problems.clip_shares(scored.logprob, data, **self.case.clip)._asdict()

    def step(self, competitor: Competitor) -> Any:
        """Runs a competitor once; its results are ready on return.

        The accumulator in the results is shared: the next step of any competitor overwrites it.
        """
        inputs, _ = self._data[competitor.batch]
        if self.case.hidden is None:
            return jax.block_until_ready(competitor.compilation.compiled(*inputs))
        accumulator, self._accumulator = self._accumulator, None
        results = jax.block_until_ready(competitor.compilation.compiled(*inputs, accumulator))
        self._accumulator = results[-1]
        return results

    def reset(self) -> None:
        """Sets the accumulator to zeros, having freed the last one."""
        if self.case.hidden is not None:
            self._accumulator = None
            shape = (self.case.vocab, self.case.hidden)
            self._accumulator = jax.block_until_ready(jnp.zeros(shape, jnp.float32))

    def errors(self, competitor: Competitor, results: Any, check_tokens: int) -> dict[str, Any]:
        """How far a competitor's first results are from float64."""
        inputs, scored = self._data[competitor.batch]
        if self.case.hidden is None:
            return logits_errors(self.case, inputs, results, check_tokens)
        return head_errors(self.case, inputs, scored, results, check_tokens)


def measure(
    case: Case,
    specs: Sequence[CompetitorSpec],
    device: jax.Device,
    *,
    effort: Effort,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measures all competitors.

    Returns:
        `runs`, one flat record each, and `ratios` of their medians; all plain values.

    Raises:
        DoesNotFit: if it does not fit the device's memory.
    """
    names = ", ".join(map(str, specs))
    progress(f"{case.shape_text} on {device.device_kind}: compiling {names}")
    competition = Competition(case, specs, device)
    progress(f"{case.shape_text} on {device.device_kind}: compiled, data made")
    common = _facts(case, device, competition.clip_shares())
    after_alloc = memory_in_use(device)
    runs = []
    for competitor in competition.competitors:
        competition.reset()
        run = _record(competitor, case) | common | {"mem_after_alloc": after_alloc}
        runs.append(run | _first_run(competition, competitor, device, effort.check_tokens))
        progress(f"{competitor.name}: first call {runs[-1]['first_call_s']:.2f} s")
    steps = [
        functools.partial(_discarded, competition, competitor)
        for competitor in competition.competitors
    ]
    seconds = time_interleaved(steps, warmup=effort.warmup, iters=effort.iters)
    for run, own in zip(runs, seconds, strict=True):
        run |= step_times(own) | {"iters": effort.iters, "warmup": effort.warmup}
    return {"runs": runs, "ratios": _ratios(competition.competitors, seconds)}


def _discarded(competition: Competition, competitor: Competitor) -> None:
    competition.step(competitor)


def _first_run(competition, competitor, device, check_tokens):
    start = time.perf_counter()
    results = competition.step(competitor)
    run_s = time.perf_counter() - start
    compilation = competitor.compilation
    return {
        "loss": float(results[0]),
        "first_call_s": compilation.trace_s + compilation.compile_s + run_s,
        "compile_s": compilation.compile_s,
        "mem_after_run": memory_in_use(device),
        "errors": competition.errors(competitor, results, check_tokens),
    }


def _record(competitor, case):
    tokens = case.active_tokens if competitor.batch == VALID else case.tokens
    return {
        "name": competitor.name,
        "impl": competitor.spec.choice,
        "kernel": competitor.spec.impl,
        "schedule": competitor.spec.schedule,
        "batch_kind": competitor.batch,
        "chunk_tokens": chunk_tokens(
            competitor.spec, case, tokens, masked=competitor.batch == PADDED
        ),
        "chunk_tokens_at_most": competitor.spec.chunk_tokens,
        "compiler": compiler_report(competitor.compilation.compiled),
    }


def _facts(case, device, shares):
    return {
        "case": dataclasses.asdict(case),
        "shape": {
            name: getattr(case, name)
            for name in ("batch", "time", "hidden", "vocab")
            if getattr(case, name) is not None
        },
        "dtype": case.dtype,
        "mode": case.mode,
        "device": device.device_kind,
        "platform": device.platform,
        "versions": versions(),
        "clip": shares,
    }


def _ratios(competitors, seconds) -> dict[str, float]:
    """Medians over the first competitor's on the same batch, and padded over valid tokens."""
    if not seconds[0]:
        return {}
    median = {
        (competitor.spec, competitor.batch): statistics.median(own)
        for competitor, own in zip(competitors, seconds, strict=True)
    }
    first = competitors[0].spec
    ratios = {
        f"{each.name} / {first}": median[each.spec, each.batch] / median[first, each.batch]
        for each in competitors
        if each.spec != first
    }
    return ratios | {
        f"{each.name} / {VALID}": median[each.spec, PADDED] / median[each.spec, VALID]
        for each in competitors
        if each.batch == PADDED
    }
