"""Sets up the competitors of a bench on one device, checks them, and lets them run in turn."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import random_problems
from benchmarks.kernels.case import Case, Spec, available_bytes, check_fits
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
from benchmarks.timing import (
    Compilation,
    compile_program,
    compiler_report,
    memory_in_use,
    program_bytes,
    step_times,
    time_interleaved,
    versions,
)
from kernels.token_logprob.reference import TokenLogprob

ALL, PADDED, VALID = "all", "padded", "valid"
"""Batches: without a mask; with one; and the tokens that count, by themselves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How long and how closely is looked; any may be 0."""

    iters: int
    warmup: int
    check_tokens: int

    def __post_init__(self):
        for name in ("iters", "warmup", "check_tokens"):
            if getattr(self, name) < 0:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be at least 0, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Entrant:
    """One competitor on one batch."""

    spec: Spec
    batch: str
    """ALL, PADDED or VALID."""
    compilation: Compilation

    @property
    def name(self) -> str:
        return str(self.spec) if self.batch == ALL else f"{self.spec} ({self.batch})"


class Ring:
    """The competitors with the arrays they run on, and the one accumulator they share."""

    def __init__(self, case: Case, specs: Sequence[Spec], device: jax.Device):
        """Compiles every competitor for shapes alone, then makes the data.

        Raises:
            DoesNotFit: if the device's memory will not hold it.
        """
        self.case = case
        self._accumulator: Any = None
        available = available_bytes(device)
        check_fits(f"{case.shape_text}, inputs and gradients alone,", case.least_bytes, available)
        make = make_logits_inputs if case.hidden is None else make_head_inputs
        shapes = jax.eval_shape(lambda: self._batches(*make(case)))
        self.entrants = [
            Entrant(spec, batch, self._compiled(spec, inputs))
            for spec in specs
            for batch, (inputs, _) in shapes.items()
        ]
        for entrant in self.entrants:
            needed = program_bytes(entrant.compilation.compiled)
            check_fits(f"{entrant.name} at {case.shape_text}", needed, available)
        self._data: dict[str, Any] = jax.block_until_ready(self._batches(*make(case)))

    def _batches(self, inputs: Any, scored: TokenLogprob) -> dict[str, Any]:
        if not isinstance(inputs, HeadInputs) or inputs.active_N is None:
            return {ALL: (inputs, scored)}
        token_N = jnp.nonzero(inputs.active_N, size=self.case.active_tokens)[0]
        alone = jax.tree.map(lambda leaf: leaf[token_N], scored)
        return {PADDED: (inputs, scored), VALID: (without_padding(inputs, self.case), alone)}

    def _compiled(self, spec, inputs) -> Compilation:
        if self.case.hidden is None:
            return compile_program(logits_program(spec, self.case), inputs)
        accumulator = jax.ShapeDtypeStruct(inputs.head_VD.shape, jnp.float32)
        return compile_program(head_program(spec, self.case), (*inputs, accumulator))

    def clip_shares(self) -> dict[str, float]:
        """Of the whole batch, or of its tokens that count."""
        inputs, scored = next(reversed(self._data.values()))
        data = jax.tree.map(jnp.ravel, inputs.data)
        return random_problems.clip_shares(scored.logprob, data, **self.case.clip)._asdict()

    def step(self, entrant: Entrant) -> Any:
        """Runs a competitor once; its results are ready on return.

        The accumulator among them is lent: the next step of anyone takes it back.
        """
        inputs, _ = self._data[entrant.batch]
        if self.case.hidden is None:
            return jax.block_until_ready(entrant.compilation.compiled(*inputs))
        accumulator, self._accumulator = self._accumulator, None
        results = jax.block_until_ready(entrant.compilation.compiled(*inputs, accumulator))
        self._accumulator = results[-1]
        return results

    def reset(self) -> None:
        """Sets the accumulator to zeros, having freed the last one."""
        if self.case.hidden is not None:
            self._accumulator = None
            shape = (self.case.vocab, self.case.hidden)
            self._accumulator = jax.block_until_ready(jnp.zeros(shape, jnp.float32))

    def errors(self, entrant: Entrant, results: Any, check_tokens: int) -> dict[str, Any]:
        """How far a competitor's first results are from float64."""
        inputs, scored = self._data[entrant.batch]
        if self.case.hidden is None:
            return logits_errors(self.case, inputs, results, check_tokens)
        return head_errors(self.case, inputs, scored, results, check_tokens)


def measure(
    case: Case,
    specs: Sequence[Spec],
    device: jax.Device,
    *,
    effort: Effort,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measures all competitors.

    Returns:
        `runs`, one flat record each, and `ratios` of their medians; all plain values.

    Raises:
        DoesNotFit: if the device's memory will not hold it.
    """
    names = ", ".join(map(str, specs))
    progress(f"{case.shape_text} on {device.device_kind}: compiling {names}")
    ring = Ring(case, specs, device)
    progress(f"{case.shape_text} on {device.device_kind}: compiled, data made")
    common = _facts(case, device, ring.clip_shares())
    after_alloc = memory_in_use(device)
    runs = []
    for entrant in ring.entrants:
        ring.reset()
        run = _record(entrant, case) | common | {"mem_after_alloc": after_alloc}
        runs.append(run | _first_run(ring, entrant, device, effort.check_tokens))
        progress(f"{entrant.name}: first call {runs[-1]['first_call_s']:.2f} s")
    steps = [functools.partial(_discarded, ring, entrant) for entrant in ring.entrants]
    seconds = time_interleaved(steps, warmup=effort.warmup, iters=effort.iters)
    for run, own in zip(runs, seconds, strict=True):
        run |= step_times(own) | {"iters": effort.iters, "warmup": effort.warmup}
    return {"runs": runs, "ratios": _ratios(ring.entrants, seconds)}


def _discarded(ring: Ring, entrant: Entrant) -> None:
    ring.step(entrant)


def _first_run(ring, entrant, device, check_tokens):
    start = time.perf_counter()
    results = ring.step(entrant)
    run_s = time.perf_counter() - start
    compilation = entrant.compilation
    return {
        "loss": float(results[0]),
        "first_call_s": compilation.trace_s + compilation.compile_s + run_s,
        "compile_s": compilation.compile_s,
        "mem_after_run": memory_in_use(device),
        "errors": ring.errors(entrant, results, check_tokens),
    }


def _record(entrant, case):
    tokens = case.active_tokens if entrant.batch == VALID else case.tokens
    return {
        "name": entrant.name,
        "impl": entrant.spec.choice,
        "kernel": entrant.spec.impl,
        "schedule": entrant.spec.schedule,
        "batch_kind": entrant.batch,
        "chunk_tokens": chunk_tokens(entrant.spec, case, tokens, masked=entrant.batch == PADDED),
        "chunk_tokens_at_most": entrant.spec.chunk_tokens,
        "compiler": compiler_report(entrant.compilation.compiled),
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


def _ratios(entrants, seconds) -> dict[str, float]:
    """Medians over the first competitor's on the same batch, and padded over valid tokens."""
    if not seconds[0]:
        return {}
    median = {
        (entrant.spec, entrant.batch): statistics.median(own)
        for entrant, own in zip(entrants, seconds, strict=True)
    }
    first = entrants[0].spec
    ratios = {
        f"{each.name} / {first}": median[each.spec, each.batch] / median[first, each.batch]
        for each in entrants
        if each.spec != first
    }
    return ratios | {
        f"{each.name} / {VALID}": median[each.spec, PADDED] / median[each.spec, VALID]
        for each in entrants
        if each.batch == PADDED
    }
