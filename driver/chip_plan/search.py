"""The largest value of a setting at which a run fits its chips, found with few compilations.

Memory grows nearly in proportion to these settings, so that each trial is where the line through
the trials before it meets the chip's memory; between a value that fits and one that does not it is
bisection. What is returned as fitting was compiled and fits.
"""

import dataclasses
from collections.abc import Callable, Sequence

from driver.chip_plan.learner_programs import OF_MICROBATCHES
from driver.chip_plan.run_program import TEMPORARIES, RunProgram
from driver.chip_plan.run_shape import PlanRequest, RunShape
from driver.chip_plan.worker_programs import CACHE, POOL
from driver.config.load_config import ConfigError
from driver.config.wording import say_bytes
from learner.objective.batching import row_buckets

MOST_TRIALS = 4
"""Values that are compiled for one setting, beside the configuration's own."""
MOST_TOKENS = 2**24
"""Of a micro-batch."""
CONTEXT = "context (prompt + completion)"
MICROBATCH = "learner.microbatch_tokens"
SLOTS = "rollout.decode.slots"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One value, compiled or refused."""

    value: int
    need_bytes: int = 0
    """Of the program that needs the most of those that depend on the setting."""
    program: str = ""
    fits: bool = False
    refused: str = ""
    """Why the configuration does not take the value; nothing was compiled then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """What the search found for one setting."""

    key: str
    now: int
    """The configuration's value."""
    fits: Trial | None
    """The largest value that fits; None where none does."""
    exceeds: Trial | None
    """The smallest value above it that was compiled and does not fit, or was refused."""
    limit: str = ""
    """What ended the search below that, such as the model's longest context."""
    overrides: tuple[str, ...] = ()
    """What to `--set` for the value that fits."""

    @property
    def text(self) -> str:
        """One line."""
        if self.fits is None:
            return f"{self.key}: no value fits, {self.limit}"
        more = ""
        if self.exceeds is not None and self.exceeds.refused:
            more = f"; {self.exceeds.value:,} is refused: {self.exceeds.refused}"
        elif self.exceeds is not None:
            more = (
                f"; {self.exceeds.value:,} needs {say_bytes(self.exceeds.need_bytes)} in "
                f"{self.exceeds.program}"
            )
        elif self.limit:
            more = f"; {self.limit}"
        return (
            f"{self.key}: at most {self.fits.value:,} (now {self.now:,}), with "
            f"{say_bytes(self.fits.need_bytes)} in {self.fits.program}{more}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that memory depends on."""

    key: str
    now: int
    step: int
    """Values are multiples of it, and `least`."""
    least: int
    most: int
    most_is: str
    """Why there is no larger value."""
    roles: tuple[str, ...]
    programs: frozenset[str]
    """That depend on it."""
    grows: frozenset[str]
    """Parts of memory that grow in proportion to it."""
    overrides: Callable[[int], tuple[str, ...]]


def settings_of(shape: RunShape) -> tuple[Setting, ...]:
    """Micro-batch, slots and context of a run."""
    config, plan = shape.config, shape.plan
    lanes, context = plan.worker.lanes, plan.mesh.context
    longest = shape.model.max_position_embeddings
    sequence = config.sequence_tokens - 1  # as in a row: the last token is only ever a target
    row = next(tokens for tokens in row_buckets(MOST_TOKENS) if tokens >= sequence)
    decoding = frozenset({"empty", "prefill", "prefill, later", "segment", "resize"})
    context_step = max(16, longest // 32)
    return (
        Setting(
            key=MICROBATCH,
            now=config.learner.microbatch_tokens,
            step=-(-row // context),
            # The shortest row that holds a sequence; each of several devices has two halves.
            least=-(-config.sequence_tokens // (2 * context)) * 2,
            most=MOST_TOKENS,
            most_is="the largest that the setting takes",
            roles=("learner",),
            programs=OF_MICROBATCHES,
            grows=frozenset({TEMPORARIES}),
            overrides=lambda value: (f"learner.microbatch_tokens={value}",),
        ),
        Setting(
            key=SLOTS,
            now=config.rollout.decode.slots,
            step=lanes,
            least=lanes,
            most=65_536 // lanes * lanes,
            most_is="the largest that the setting takes",
            roles=("worker",),
            programs=decoding,
            grows=frozenset({CACHE, POOL}),
            overrides=lambda value: (f"rollout.decode.slots={value}",),
        ),
        Setting(
            key=CONTEXT,
            now=config.sequence_tokens,
            step=context_step,
            least=context_step,
            most=longest,
            most_is=f"the model was trained for {longest:,} positions",
            roles=("learner", "worker"),
            programs=OF_MICROBATCHES | decoding,
            grows=frozenset({CACHE, POOL, TEMPORARIES}),
            overrides=lambda value: _context(shape, value),
        ),
    )


class LargestSearch:
    """Finds the largest values at which a run fits; no value is compiled twice."""

    def __init__(self, request: PlanRequest, say: Callable[[str], None] = lambda text: None):
        """Args:
        say: called with a line for every value that is compiled.
        """
        self._request = request
        self._say = say
        self._compiled: dict[tuple[str, int], tuple[RunShape, list[RunProgram]]] = {}

    def largest_fitting(self, setting: Setting, known: Sequence[RunProgram]) -> Largest:
        """The largest value of a setting at which programs fit.

        Args:
            known: programs of the configuration itself, compiled. Those of the setting's roles and
                those that depend on it must fit; what it does not change is not compiled again.
        """
        usable = self._request.topology.usable_bytes
        known = [one for one in known if one.role in setting.roles or _depends(one, setting)]
        if why := _never_fits(setting, known, usable):
            return Largest(key=setting.key, now=setting.now, fits=None, exceeds=None, limit=why)
        concerned = [one for one in known if _depends(one, setting)]
        fixed = max(one.need_bytes - _growing(one, setting) for one in concerned)
        trials = [_trial(setting.now, concerned, usable)]
        while sum(not one.refused for one in trials) <= MOST_TRIALS:
            value = next_value(setting, trials, usable, fixed)
            if value is None:
                break
            trials.append(self._try(setting, value, concerned))
        return _largest(setting, trials)

    def _try(self, setting: Setting, value: int, concerned: list[RunProgram]) -> Trial:
        key = (setting.key, value)
        usable = self._request.topology.usable_bytes
        if key not in self._compiled:
            try:
                shape = self._request.shape(*setting.overrides(value))
            except ConfigError as error:
                return Trial(value=value, refused=str(error))
            programs = list(shape.compile_programs(setting.roles, setting.programs))
            self._compiled[key] = shape, programs
            need = say_bytes(_trial(value, programs, usable).need_bytes)
            self._say(f"  {setting.key}={value:,}: {need}")
        shape, programs = self._compiled[key]
        asked = {one.role for one in concerned}
        own = [one for one in programs if one.role in asked]
        beside = [shape.beside(one) for one in concerned if not _is_compiled(one, setting)]
        return _trial(value, [*own, *beside], usable)


def _never_fits(setting: Setting, known: Sequence[RunProgram], usable: int) -> str:
    """What does not fit whatever the value is; nothing where there is no such program."""
    worst = max(known, key=lambda one: one.need_bytes - _growing(one, setting))
    fixed = worst.need_bytes - _growing(worst, setting)
    where = f"{worst.role} {worst.name}"
    if fixed > usable:
        return f"what does not depend on it needs {say_bytes(fixed)} alone in {where}"
    broken = [one for one in known if one.error and not _depends(one, setting)]
    return "".join(f"{one.role} {one.name} does not compile" for one in broken[:1])


def _largest(setting: Setting, trials: list[Trial]) -> Largest:
    """What the trials say."""
    fitting = max((one for one in trials if one.fits), key=lambda one: one.value, default=None)
    low = fitting.value if fitting else 0
    above = [one for one in trials if not one.fits and one.value > low]
    exceeds = min(above, key=lambda one: one.value, default=None)
    limit = ""
    if fitting is None:
        smallest = min(trials, key=lambda one: one.value)
        limit = f"{smallest.value:,} does not, the smallest that was tried"
        if smallest.refused:
            limit = f"{smallest.value:,} is refused: {smallest.refused}"
    elif fitting.value >= setting.most:
        limit = setting.most_is
    elif exceeds is None:
        limit = f"larger ones were not tried after {MOST_TRIALS} compilations"
    return Largest(
        key=setting.key,
        now=setting.now,
        fits=fitting,
        exceeds=exceeds,
        limit=limit,
        overrides=setting.overrides(fitting.value) if fitting else (),
    )


def next_value(setting: Setting, trials: list[Trial], usable: int, fixed: int) -> int | None:
    """The value to try next; None where it is settled.

    Args:
        trials: at least one.
        fixed: bytes that do not grow with the setting.
    """
    step = setting.step
    # What is refused below the configuration's value is too small, and above it too large.
    small = [one for one in trials if one.fits or (one.refused and one.value < setting.now)]
    low = max((one.value for one in small), default=0)
    high = min((one.value for one in trials if one not in small), default=setting.most + step)
    first, last = low // step + 1, -(-high // step) - 1
    last = min(last, setting.most // step)
    if first > last:
        return setting.least if low < setting.least < min(high, step) else None
    guess = _meets(trials, usable, fixed) // step
    bounded = low > 0 and high <= setting.most
    # Beside the line's own value the next one settles it, unless that was tried in vain before.
    crept = any(one.fits and one.value == low - step for one in trials)
    if bounded and (crept or not first - 1 <= guess <= last + 1):
        guess = (first + last) // 2
    return int(min(max(guess, first), last)) * step


def _meets(trials: list[Trial], usable: int, fixed: int) -> int:
    """Where the line through the two trials nearest to the memory reaches it."""
    compiled = [one for one in trials if not one.refused]
    near = sorted(compiled, key=lambda one: abs(one.need_bytes - usable))[:2]
    if len(near) == 1:
        (one,) = near
        return one.value * (usable - fixed) // max(1, one.need_bytes - fixed)
    one, other = sorted(near, key=lambda trial: trial.value)
    rise = other.need_bytes - one.need_bytes
    if rise <= 0:
        return 2 * other.value
    return one.value + (usable - one.need_bytes) * (other.value - one.value) // rise


def _trial(value: int, programs: Sequence[RunProgram], usable: int) -> Trial:
    worst = max(programs, key=lambda one: one.need_bytes)
    return Trial(
        value=value,
        need_bytes=worst.need_bytes,
        program=f"{worst.role} {worst.name}",
        fits=all(program.fits(usable) for program in programs),
    )


def _is_compiled(program: RunProgram, setting: Setting) -> bool:
    """Whether another value of the setting makes another program of it."""
    return program.role in setting.roles and program.name in setting.programs


def _depends(program: RunProgram, setting: Setting) -> bool:
    """Whether its need of memory depends on the setting."""
    return _is_compiled(program, setting) or not setting.grows.isdisjoint(program.beside)


def _growing(program: RunProgram, setting: Setting) -> int:
    """Bytes that grow with the setting."""
    parts = program.parts if _is_compiled(program, setting) else program.beside
    return sum(count for name, count in parts.items() if name in setting.grows)


def _context(shape: RunShape, value: int) -> tuple[str, ...]:
    """Overrides for a context: a longer completion, and micro-batches that hold it."""
    prompt = min(shape.config.rollout.max_prompt_tokens, value // 2)
    share = -(-value // shape.plan.mesh.context)
    tokens = max(shape.config.learner.microbatch_tokens, share)
    return (
        f"rollout.max_prompt_tokens={prompt}",
        f"rollout.max_completion_tokens={value - prompt}",
        f"learner.microbatch_tokens={tokens}",
    )
