"""Whether the programs of a run fit a chip, in words."""

from collections.abc import Sequence

from driver.chip_plan.run_program import RunProgram
from driver.config.wording import say_bytes


def roles_that_do_not_fit(
    programs: Sequence[RunProgram], usable_bytes: int
) -> dict[str, RunProgram]:
    """The program that needs the most, for each role with one that needs too much."""
    worst = largest_of_each(programs)
    return {role: one for role, one in worst.items() if one.need_bytes > usable_bytes}


def largest_of_each(programs: Sequence[RunProgram]) -> dict[str, RunProgram]:
    """The program of each role that needs the most."""
    found: dict[str, RunProgram] = {}
    for program in programs:
        if program.role not in found or program.need_bytes > found[program.role].need_bytes:
            found[program.role] = program
    return found


def verdict(
    programs: Sequence[RunProgram], usable_bytes: int, chip: str = "a chip"
) -> tuple[bool, str]:
    """Whether all of them fit, and a line for each role, or for each program that does not.

    Args:
        chip: what has the usable bytes, in words.

    Raises:
        ValueError: if there is no program to judge.
    """
    if not programs:
        raise ValueError("no program was compiled, so nothing is known to fit")
    lines = []
    for role, worst in largest_of_each(programs).items():
        own = [program for program in programs if program.role == role]
        bad = [program for program in own if not program.fits(usable_bytes)]
        broken = [program for program in bad if program.need_bytes <= usable_bytes]
        lines += [f"{role} {one.name} does not compile: {one.error}" for one in broken]
        if worst.need_bytes > usable_bytes:
            more = [one.name for one in bad if one not in broken and one is not worst]
            lines.append(
                f"{role} does NOT fit: {_need(worst)}, "
                f"{say_bytes(worst.need_bytes - usable_bytes)} more than the "
                f"{say_bytes(usable_bytes)} of {chip}" + f"; nor do {', '.join(more)}" * bool(more)
            )
        elif not bad:
            lines.append(
                f"{role} fits: at most {_need(worst)}, "
                f"{say_bytes(usable_bytes - worst.need_bytes)} of {say_bytes(usable_bytes)} to "
                "spare"
            )
    return all(program.fits(usable_bytes) for program in programs), "\n".join(lines)


def _need(program: RunProgram) -> str:
    parts = ", ".join(f"{name} {say_bytes(n)}" for name, n in program.parts.items() if n)
    return f"{say_bytes(program.need_bytes)} in {program.name}" + f" ({parts})" * bool(parts)
