"""Memory that a compiled program needs of a chip, and whether it fits: arithmetic of tpu_check.

All bytes are those of one chip. GB are 10^9 bytes.
"""

import dataclasses
from collections.abc import Sequence

V6E_USABLE_BYTES = round(31.25 * 2**30)
"""Of the 32 GiB of a TPU v6e chip; the rest is the runtime's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunProgram:
    """One compiled program, or the attempt at one."""

    role: str
    """`learner` or `worker`."""
    name: str
    compile_s: float
    error: str = ""
    """What the compiler said where it gave up; the sizes are 0 then."""
    peak_bytes: int = 0
    """Arguments, outputs and temporaries at the moment when they are the most."""
    argument_bytes: int = 0
    output_bytes: int = 0
    """Those in donated arguments included."""
    temp_bytes: int = 0
    """Size of the compiler's heap: at least what is alive at once."""
    accessed_bytes: int = 0
    """Read or written by one run; the body of a loop is counted once."""
    beside_bytes: int = 0
    """Arrays that stay on the chip during the run and are no arguments of the program."""
    beside: str = ""
    """What these are."""

    @property
    def need_bytes(self) -> int:
        """Memory of a chip while this program runs."""
        return self.peak_bytes + self.beside_bytes

    def fits(self, usable_bytes: int) -> bool:
        """Whether it compiled and needs no more than this."""
        return not self.error and self.need_bytes <= usable_bytes


HEADER = (
    f"{'program':<22}{'compile':>9}{'arguments':>11}{'outputs':>9}{'temp':>8}{'peak':>8}"
    f"{'beside':>8}{'needs':>8}{'accessed':>10}"
)


def table_row(program: RunProgram) -> str:
    """One line under HEADER: seconds, then GB of one chip."""
    start = f"{program.role + ' ' + program.name:<22}{program.compile_s:>7.1f} s"
    if program.error:
        return f"{start}  does not compile"
    widths = {
        "argument_bytes": 11,
        "output_bytes": 9,
        "temp_bytes": 8,
        "peak_bytes": 8,
        "beside_bytes": 8,
        "need_bytes": 8,
        "accessed_bytes": 10,
    }
    return start + "".join(
        f"{getattr(program, name) / 1e9:>{width}.2f}" for name, width in widths.items()
    )


def verdict(programs: Sequence[RunProgram], usable_bytes: int) -> tuple[bool, str]:
    """Whether all of them fit, and a line for each role, or for each program that does not.

    Raises:
        ValueError: if there is no program to judge.
    """
    if not programs:
        raise ValueError("no program was compiled, so nothing is known to fit")
    lines = []
    for role in dict.fromkeys(program.role for program in programs):
        own = [program for program in programs if program.role == role]
        bad = [program for program in own if not program.fits(usable_bytes)]
        lines += [_refusal(program, usable_bytes) for program in bad]
        if not bad:
            worst = max(own, key=lambda program: program.need_bytes)
            lines.append(
                f"{role} fits: at most {_need(worst)}, {_gb(usable_bytes - worst.need_bytes)} "
                f"of {_gb(usable_bytes)} to spare"
            )
    return all(program.fits(usable_bytes) for program in programs), "\n".join(lines)


def _refusal(program: RunProgram, usable_bytes: int) -> str:
    if program.error:
        return f"{program.role} {program.name} does not compile: {program.error}"
    return (
        f"{program.role} does NOT fit: {_need(program)}, {_gb(program.need_bytes - usable_bytes)} "
        f"more than the {_gb(usable_bytes)} of a chip"
    )


def _need(program: RunProgram) -> str:
    text = f"{_gb(program.need_bytes)} in {program.name}"
    if program.beside_bytes:
        text += f" ({program.beside} of {_gb(program.beside_bytes)} included)"
    return text


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
