"""Compiled programs by name and sizes, with what each compilation cost and why it was needed."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from services.process.phase_clock import PhaseClock

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """One program that was compiled."""

    program: str
    sizes: dict[str, int]
    because: str
    """`first use`, or the sizes in which it differs from the nearest one that existed."""
    seconds: float


class UnplannedCompilation(RuntimeError):
    """More programs than planned: some size changes that should not."""


class ProgramCache:
    """Compiles each program once for every set of sizes, and keeps count."""

    def __init__(
        self,
        clock: PhaseClock,
        *,
        budget: int,
        over_budget: Literal["warn", "error"],
        warn: Callable[[str], None],
    ):
        """Args:
        clock: gets the seconds of `compile`.
        budget: number of programs that were planned.
        over_budget: whether one more is a warning or an error.
        warn: called with the text of a warning.
        """
        self._clock = clock
        self._budget = budget
        self._over_budget = over_budget
        self._warn = warn
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self.compilations: list[Compilation] = []

    def get_program(
        self, name: str, sizes: Sizes, build: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """The program of this name for these sizes, compiled by `build` where it is new.

        Raises:
            UnplannedCompilation: if it is one too many and the budget is strict.
        """
        key = (name, *sizes.items())
        program = self._compiled.get(key)
        if program is None:
            because = self._because(name, sizes)
            if len(self._compiled) >= self._budget:
                self._unplanned(name, because)
            started = time.monotonic()
            with self._clock.phase("compile"):
                program = build()
            self._compiled[key] = program
            self.compilations.append(
                Compilation(
                    program=name,
                    sizes=dict(sizes),
                    because=because,
                    seconds=time.monotonic() - started,
                )
            )
        return program

    def peak_bytes(self) -> int:
        """Device bytes of the largest program with its arguments, as the compiler counts them."""
        needs = [_need_bytes(program.memory_analysis()) for program in self._compiled.values()]
        return max(needs, default=0)

    def _because(self, name: str, sizes: Sizes) -> str:
        known = [one.sizes for one in self.compilations if one.program == name]
        if not known:
            return "first use"
        nearest = min(known, key=lambda other: sum(other[k] != sizes[k] for k in sizes))
        changed = [f"{k} {nearest[k]} -> {sizes[k]}" for k in sizes if nearest[k] != sizes[k]]
        return ", ".join(changed)

    def _unplanned(self, name: str, because: str) -> None:
        message = (
            f"program {name} is compiled ({because}), but {len(self._compiled)} programs exist and "
            f"rollout.decode.compile_budget={self._budget} were planned: raise it, or keep that "
            "size the same"
        )
        if self._over_budget == "error":
            raise UnplannedCompilation(message)
        self._warn(message)


def _need_bytes(memory: Any) -> int:
    return memory.peak_memory_in_bytes
