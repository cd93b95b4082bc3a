"""The largest value of a setting at which a run fits its chips, found with few compilations.

Memory grows nearly in proportion to these settings, so that each trial is where the line through
the trials before it meets the chip's memory; between a value that fits and one that does not it is
bisection. What is returned as fitting was compiled and fits.
"""

import dataclasses
from collections.abc import Callable

from driver.chip_plan.memory_fit import largest_of_each
from driver.chip_plan.run_program import TEMPORARIES, RunProgram
from driver.chip_plan.run_shape import PlanRequest, RunShape
from driver.chip_plan.worker_programs import CACHE, POOL
from driver.config.load_config import ConfigError
from driver.config.wording import say_bytes

MOST_TRIALS = 4
"""Values that are compiled for one setting, beside the configuration's own."""
CONTEXT = "context (prompt + completion)"
MICROBATCH = "learner.microbatch_tokens"
SLOTS = "rollout.decode.slots"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One value, compiled."""

    value: int
    need_bytes: int
    """Of the program that needs the most."""
    program: str
    fits: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """What the search found for one setting."""

    key: str
    now: int
    """The configuration's value."""
    fits: Trial | None
    """The largest value that fits; None where none does."""
    exceeds: Trial | None
    """The smallest value above it that was compiled and does not fit."""
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
        if self.exceeds is not None:
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
    """Values are multiples of it."""
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
    row, lanes = -(-plan.row_tokens // plan.mesh.context), plan.worker.lanes
    longest = shape.model.max_position_embeddings
    return (
        Setting(
            key=MICROBATCH,
            now=config.learner.microbatch_tokens,
            step=row,
            most=2**24,
            most_is="the largest that the setting takes",
            roles=("learner",),
            programs=frozenset({"accumulate"}),
            grows=frozenset({TEMPORARIES}),
            overrides=lambda value: (f"learner.microbatch_tokens={value}",),
        ),
        Setting(
            key=SLOTS,
            now=config.rollout.decode.slots,
            step=lanes,
            most=65_536 // lanes * lanes,
            most_is="the largest that the setting takes",
            roles=("worker",),
            programs=frozenset({"prefill", "prefill, later", "segment"}),
            grows=frozenset({CACHE, POOL}),
            overrides=lambda value: (f"rollout.decode.slots={value}",),
        ),
        Setting(
            key=CONTEXT,
            now=config.sequence_tokens,
            step=max(16, longest // 32),
            most=longest,
            most_is=f"the model was trained for {longest:,} positions",
            roles=("learner", "worker"),
            programs=frozenset({"accumulate", "prefill", "prefill, later", "segment"}),
            grows=frozenset({CACHE, POOL, TEMPORARIES}),
            overrides=lambda value: _context(shape, value),
        ),
    )


def largest_fitting(
    request: PlanRequest,
    setting: Setting,
    known: list[RunProgram],
    say: Callable[[str], None] = lambda text: None,
) -> Largest:
    """The largest value of a setting that fits.

    Args:
        known: the programs of the configuration itself, compiled.
        say: called with a line for every trial.
    """
    usable = request.topology.usable_bytes
    own = [one for one in known if one.role in setting.roles]
    fixed = max(one.need_bytes - _growing(one, setting) for one in own)
    if fixed > usable:
        why = f"what does not depend on it needs {say_bytes(fixed)} alone"
        return Largest(key=setting.key, now=setting.now, fits=None, exceeds=None, limit=why)
    concerned = [one for one in own if one.name in setting.programs] or own
    trials = {setting.now: _trial(setting.now, concerned, usable)}
    for _ in range(MOST_TRIALS):
        value = next_value(setting, list(trials.values()), usable, fixed)
        if value is None:
            break
        try:
            shape = request.shape(*setting.overrides(value))
        except ConfigError as error:
            fitting = _best(trials)
            return _found(setting, fitting, None, f"{value:,} is refused: {error}")
        programs = list(shape.compile_programs(setting.roles, setting.programs))
        trials[value] = _trial(value, programs, usable)
        say(f"  {setting.key}={value:,}: {say_bytes(trials[value].need_bytes)}")
    fitting = _best(trials)
    above = [one for one in trials.values() if not one.fits]
    exceeds = min(above, key=lambda one: one.value, default=None)
    limit = ""
    if fitting is None:
        limit = f"{exceeds.value:,} does not, the smallest that was tried" if exceeds else ""
    elif fitting.value >= setting.most:
        limit = setting.most_is
    elif exceeds is None:
        limit = f"larger ones were not tried after {MOST_TRIALS} compilations"
    return _found(setting, fitting, exceeds, limit)


def next_value(setting: Setting, trials: list[Trial], usable: int, fixed: int) -> int | None:
    """The value to try next; None where it is settled.

    Args:
        trials: at least one.
        fixed: bytes that do not grow with the setting.
    """
    step = setting.step
    low = max((one.value for one in trials if one.fits), default=0)
    high = min((one.value for one in trials if not one.fits), default=setting.most + step)
    first, last = low // step + 1, -(-high // step) - 1
    last = min(last, setting.most // step)
    if first > last:
        return None
    guess = _meets(trials, usable, fixed) // step
    bounded = low > 0 and high <= setting.most
    # Beside the line's own value the next one settles it, unless that was tried in vain before.
    crept = any(one.fits and one.value == low - step for one in trials)
    if bounded and (crept or not first - 1 <= guess <= last + 1):
        guess = (first + last) // 2
    return int(min(max(guess, first), last)) * step


def _meets(trials: list[Trial], usable: int, fixed: int) -> int:
    """Where the line through the two trials nearest to the memory reaches it."""
    near = sorted(trials, key=lambda one: abs(one.need_bytes - usable))[:2]
    if len(near) == 1:
        (one,) = near
        return one.value * (usable - fixed) // max(1, one.need_bytes - fixed)
    one, other = sorted(near, key=lambda trial: trial.value)
    rise = other.need_bytes - one.need_bytes
    if rise <= 0:
        return 2 * other.value
    return one.value + (usable - one.need_bytes) * (other.value - one.value) // rise


def _trial(value: int, programs: list[RunProgram], usable: int) -> Trial:
    worst = max(largest_of_each(programs).values(), key=lambda one: one.need_bytes)
    return Trial(
        value, worst.need_bytes, f"{worst.role} {worst.name}", all(p.fits(usable) for p in programs)
    )


def _growing(program: RunProgram, setting: Setting) -> int:
    return sum(count for name, count in program.parts.items() if name in setting.grows)


def _best(trials: dict[int, Trial]) -> Trial | None:
    return max(
        (one for one in trials.values() if one.fits), key=lambda one: one.value, default=None
    )


def _found(setting: Setting, fitting: Trial | None, exceeds: Trial | None, limit: str) -> Largest:
    return Largest(
        key=setting.key,
        now=setting.now,
        fits=fitting,
        exceeds=exceeds,
        limit=limit,
        overrides=setting.overrides(fitting.value) if fitting else (),
    )


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
