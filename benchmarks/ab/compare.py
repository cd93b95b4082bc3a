"""Whether two implementations agree: in loss, gradient norm and the update of the parameters.

The difference of the parameters is judged as a part of the whole update, after minus start, not of
the parameters: at a learning rate of 1e-6 any two updates leave equal parameters behind, to seven
digits. The two differences are one and the same array, so this is the stricter of the two.

What two right implementations may differ by is the noise of their arithmetic:

* float32 on a CPU differs in the order of sums. Loss and gradient norm keep their digits. Adam
  divides a gradient by its own size, so that an element whose true gradient is zero moves by a
  whole learning rate either way: a few such elements are what the update's tolerance is for.
* Elsewhere (bfloat16, or float32 that a GPU or TPU multiplies with fewer digits) the first
  implementation is trained once more in float32 at the highest precision. How far it then is from
  itself is its noise; another implementation may be NOISE_FACTOR times as far, but never less than
  one rounding of that arithmetic.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.ab.job import RunResult

NOISE_FACTOR = 2.0
"""Two independent errors add up to 1.4 of one; the rest is for the few steps it is measured on."""
_VALUES_AT_ONCE = 2**22


class Tolerances(NamedTuple):
    """Largest relative difference of each quantity that is no disagreement."""

    loss: float
    """Of the larger loss, or of 1 where both are smaller: terms of about 1 cancel in it."""
    grad_norm: float
    update: float
    """Of the longer update; Euclidean norm over all parameters."""


EXACT = Tolerances(loss=1e-5, grad_norm=1e-4, update=1e-3)
"""For float32 on a CPU: a hundred times and more what the demo's eight steps differ by."""
ONE_ROUNDING = Tolerances(loss=2**-8, grad_norm=2**-8, update=1e-2)
"""Of bfloat16: the least tolerance where the noise is measured, which a lucky step could hide."""


class ParameterChange(NamedTuple):
    """How two sets of parameters differ after the same steps from the same start."""

    step: int
    update_norm: float
    """Of the first one's total update."""
    other_norm: float
    params_max: float
    """Largest absolute difference of any parameter."""
    params_relative: float
    """Norm of the difference over that of the first one's parameters."""
    update_relative: float
    """Norm of the difference over that of the longer update; 0 where neither moved."""


class Disagreement(NamedTuple):
    """The first step at which a quantity is further apart than its tolerance."""

    implementation: str
    step: int
    quantity: str
    first_value: float | None
    value: float | None
    difference: float | None
    """As Tolerances has it; None where only one of the two values is finite."""
    tolerance: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run against the first one."""

    run: RunResult
    changes: tuple[ParameterChange, ...]
    """At every step whose parameters were compared; may be empty."""


def loss_difference(a: float | None, b: float | None) -> float | None:
    """Relative to the larger, or to 1; 0 where both are absent, None where one is."""
    return _relative(a, b, least=1.0)


def grad_norm_difference(a: float | None, b: float | None) -> float | None:
    """Relative to the larger; 0 where both are absent or zero, None where one is absent."""
    return _relative(a, b, least=0.0)


def _relative(a: float | None, b: float | None, *, least: float) -> float | None:
    if a is None or b is None:
        return 0.0 if a is b else None
    scale = max(abs(a), abs(b), least)
    return abs(a - b) / scale if scale else 0.0


def compare_snapshots(
    start: pathlib.Path, first: pathlib.Path, other: pathlib.Path, step: int
) -> ParameterChange:
    """Compares two folders of parameters with each other and with the start of both.

    Args:
        start, first, other: folders of float32 .npy files with the same names and shapes.
    """
    squares = np.zeros(4)
    params_max = 0.0
    for a, b, before in _pieces(first, other, start):
        difference = a - b
        params_max = max(params_max, float(np.abs(difference).max(initial=0.0)))
        arrays = (difference, a, a - before, b - before)
        squares += [float(np.vdot(array, array)) for array in arrays]
    difference, params, first_update, other_update = np.sqrt(squares).tolist()
    longer = max(first_update, other_update)
    return ParameterChange(
        step=step,
        update_norm=first_update,
        other_norm=other_update,
        params_max=params_max,
        params_relative=difference / params if params else 0.0,
        update_relative=difference / longer if longer else 0.0,
    )


def _pieces(*folders: pathlib.Path) -> Iterator[tuple[np.ndarray, ...]]:
    """The same parts of the same parameters of every folder, float64."""
    for name in sorted(path.name for path in folders[0].iterdir()):
        flat = [np.load(folder / name, mmap_mode="r").reshape(-1) for folder in folders]
        for at in range(0, flat[0].size, _VALUES_AT_ONCE):
            yield tuple(array[at : at + _VALUES_AT_ONCE].astype(np.float64) for array in flat)


def measured_tolerances(first: RunResult, exact: Comparison) -> Tolerances:
    """From how far the first run is from itself in exact arithmetic; see the module."""
    pairs = list(zip(first.steps, exact.run.steps, strict=True))
    noise = Tolerances(
        loss=max(loss_difference(a.loss, b.loss) or 0.0 for a, b in pairs),
        grad_norm=max(grad_norm_difference(a.grad_norm, b.grad_norm) or 0.0 for a, b in pairs),
        update=max((change.update_relative for change in exact.changes), default=0.0),
    )
    return Tolerances(*(max(NOISE_FACTOR * n, m) for n, m in zip(noise, ONE_ROUNDING, strict=True)))


def disagreements(
    first: RunResult, others: Sequence[Comparison], tolerances: Tolerances
) -> list[Disagreement]:
    """Every quantity of every run that leaves its tolerance, at the first step where it does."""
    found = []
    for other in others:
        name = other.run.implementation
        for quantity, measure in (("loss", loss_difference), ("grad_norm", grad_norm_difference)):
            tolerance = getattr(tolerances, quantity)
            for a, b in zip(first.steps, other.run.steps, strict=True):
                values = getattr(a, quantity), getattr(b, quantity)
                difference = measure(*values)
                if difference is None or difference > tolerance:
                    found.append(
                        Disagreement(name, a.step, quantity, *values, difference, tolerance)
                    )
                    break
        for change in other.changes:
            if change.update_relative > tolerances.update:
                norms = change.update_norm, change.other_norm
                found.append(
                    Disagreement(
                        name,
                        change.step,
                        "update",
                        *norms,
                        change.update_relative,
                        tolerances.update,
                    )
                )
                break
    return sorted(found, key=lambda one: one.step)
