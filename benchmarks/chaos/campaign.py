"""Runs the same configuration without and with faults, and compares."""

import dataclasses
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from benchmarks.chaos import run_checks
from benchmarks.chaos.inject import HOSTILE, Injector, UnexpectedBehaviour
from benchmarks.chaos.job import CONFIG, DriverEnded, DriverJob, WaitTimeout
from benchmarks.chaos.ray_head import SPREAD, Head, HostNotStarted, running_head
from benchmarks.chaos.schedule import HOST_LOSSES, PAUSES, Fault, FaultKind
from benchmarks.chaos.sum_episodes import write_records
from services.process import failpoints
from services.trajectories.data_order import prompt_at

RECOVERY_S = 60.0
"""From a fault, or the end of a pause, to the next closed step."""
HOST_NOTICED_S = 60.0
"""Within which Ray notices that a host is lost; until then it offers no other place."""
ROOM_S = 60.0
"""In which another host has to join where one is lost."""
END_S = 120.0
"""From the last step to the end of the driver."""
STALENESS = {"sync": 0, "async": 2}
"""`rollout.max_staleness` by the mode of a campaign."""
CACHE = "jax-cache"
SCORER, SCORER_S = "benchmarks.chaos.slow_scorer:score", 0.03
"""As in `run.yaml`; in the disturbed run it may also be hostile."""
EPISODES_CONFIG = CONFIG.with_name("episodes.yaml")
RECORDS = "sums.jsonl"
SEED, PROMPTS = 0, 4
"""Of `episodes.yaml`: its seed, and the prompts of a step."""
STEP_S = 0.15
"""That an environment takes for a step: about as long as the model for a turn."""
HUNG_ERROR = r"environment_error: step 1: no result within \S+ s"
"""How an episode ends whose environment hangs (docs/environments.md)."""
CALL_S = 4.0
"""In which it must answer. Scheduling delays on a busy machine must not exceed it."""

FAILURES = (
    DriverEnded,
    WaitTimeout,
    UnexpectedBehaviour,
    HostNotStarted,
    LookupError,
    psutil.Error,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Campaign:
    """Settings of both runs, and the faults of the second."""

    steps: int
    every_steps: int
    """Between two checkpoints."""
    mode: str
    """A key of STALENESS."""
    faults: tuple[Fault, ...]
    episodes: bool = False
    """Whether the runs are of episodes of several turns, or of completions of one."""
    patience: float = 1.0
    """Every bound of time is multiplied by it, for a machine that does other work as well."""

    @property
    def settings(self) -> list[str]:
        """On top of `config`."""
        return [
            f"run.steps={self.steps}",
            f"checkpoint.every_steps={self.every_steps}",
            f"rollout.max_staleness={STALENESS[self.mode]}",
            f"placement.resources_timeout_s={ROOM_S * self.patience:g}",
            *(SPREAD if self.over_hosts else ()),
        ]

    @property
    def name(self) -> str:
        """Of the folder that gets both runs."""
        return "episodes" if self.episodes else "completions"

    @property
    def config(self) -> pathlib.Path:
        """Of both runs."""
        return EPISODES_CONFIG if self.episodes else CONFIG

    @property
    def hanging_steps(self) -> tuple[int, ...]:
        """Steps in which an environment hangs, in both runs."""
        kind = FaultKind.ENVIRONMENT_HUNG
        return tuple(fault.step + 1 for fault in self.faults if fault.kind is kind)

    @property
    def over_hosts(self) -> bool:
        """Whether the runs are spread over hosts, since one of them is lost."""
        return any(fault.kind in HOST_LOSSES for fault in self.faults)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery:
    """How long the run took to recover from one fault."""

    fault: Fault
    seconds: float

    @property
    def allowed_s(self) -> float:
        """On a machine that does nothing else."""
        kind = self.fault.kind
        return (
            RECOVERY_S
            + (self.fault.seconds if kind in PAUSES else 0.0)
            + (HOST_NOTICED_S if kind in HOST_LOSSES else 0.0)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a campaign."""

    hit: int
    lost: int
    duplicated: int
    parameters_equal: bool | None
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return not (self.lost or self.duplicated or self.problems or self.parameters_equal is False)


def sum_of_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Of several campaigns as one; parameters are equal where they are so in each."""
    equal = {outcome.parameters_equal for outcome in outcomes}
    return Outcome(
        hit=sum(outcome.hit for outcome in outcomes),
        lost=sum(outcome.lost for outcome in outcomes),
        duplicated=sum(outcome.duplicated for outcome in outcomes),
        parameters_equal=False if False in equal else None if None in equal else True,
        problems=tuple(problem for outcome in outcomes for problem in outcome.problems),
    )


def run_campaign(
    campaign: Campaign,
    folder: pathlib.Path,
    say: Callable[[str], None],
    *,
    undisturbed: pathlib.Path | None = None,
) -> Outcome:
    """Runs twice and compares.

    Args:
        folder: new; everything goes there.
        say: receives one line at a time.
        undisturbed: folder of an earlier run that was left alone; None makes one.
    """
    points = folder / "failpoints"
    points.mkdir(parents=True)
    if campaign.episodes:
        count = campaign.steps * PROMPTS
        first = [(step - 1) * PROMPTS for step in campaign.hanging_steps]
        hanging = frozenset(prompt_at(SEED, count, index)[1] for index in first)
        write_records(folder / RECORDS, count, hanging)
    # Programs are compiled once for all the processes that come and go; the compiler's part of a
    # restart is not measured here.
    extra = {
        failpoints.VARIABLE: str(points),
        "JAX_COMPILATION_CACHE_DIR": os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", str(folder / CACHE)
        ),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    recoveries: list[Recovery] = []
    problems: list[str] = []
    with running_head(folder, extra, hosts=campaign.over_hosts) as head:
        try:
            if undisturbed is None:
                say(f"{campaign.name}, undisturbed: {campaign.steps} steps, {campaign.mode}")
                undisturbed = _undisturbed(head, campaign, folder / "undisturbed")
            say(f"{campaign.name}, disturbed: {len(campaign.faults)} faults")
            for recovery in _disturbed(head, campaign, folder / "disturbed", points):
                recoveries.append(recovery)
                say(_line(recovery, len(campaign.faults)))
        except FAILURES as error:
            problems.append(str(error))
            return _failed(len(recoveries), problems)
    problems += [
        f"fault {r.fault.number}, {r.fault.kind.value}: recovered in {r.seconds:.1f} s, at most "
        f"{r.allowed_s * campaign.patience:g} are allowed"
        for r in recoveries
        if r.seconds > r.allowed_s * campaign.patience
    ]
    disturbed = run_checks.read_run(folder / "disturbed")
    return compare_runs(
        campaign, run_checks.read_run(undisturbed), disturbed, len(recoveries), problems
    )


def compare_runs(
    campaign: Campaign,
    undisturbed: run_checks.RunFiles,
    disturbed: run_checks.RunFiles,
    hit: int,
    problems: Sequence[str],
) -> Outcome:
    """Compares the disturbed run with the undisturbed one.

    Synchronous runs must train the same groups to the same bits. Asynchronous runs may sample other
    groups under other versions, so only their accounting and the staleness bound are checked.
    """
    found = [*problems]
    staleness = STALENESS[campaign.mode]
    synchronous = staleness == 0
    baseline = run_checks.check_accounting(undisturbed, steps=campaign.steps)
    found += [f"undisturbed: {problem}" for problem in baseline.problems]
    trained = [
        i for i, states in run_checks.end_states(undisturbed.ledger).items() if "trained" in states
    ]
    accounting = run_checks.check_accounting(
        disturbed, steps=campaign.steps, expected=trained if synchronous else None
    )
    found += [*accounting.problems, *run_checks.check_staleness(disturbed.metrics, staleness)]
    equal = None
    if synchronous:
        different = run_checks.different_tensors(undisturbed.parameters, disturbed.parameters)
        components = run_checks.different_components(undisturbed, disturbed)
        equal = not different and not components
        if different:
            found.append(f"{len(different)} tensors differ, first {different[0]}")
        if components:
            found.append(f"the last checkpoints differ in {', '.join(components)}")
        if divergence := run_checks.first_difference(undisturbed.metrics, disturbed.metrics):
            found.append(divergence)
    if campaign.episodes and synchronous:
        hangs = dict.fromkeys(campaign.hanging_steps, HUNG_ERROR)
        found += run_checks.check_errors(disturbed, hangs)
    return Outcome(
        hit=hit,
        lost=len(baseline.lost) + len(accounting.lost),
        duplicated=len(baseline.duplicated) + len(accounting.duplicated),
        parameters_equal=equal,
        problems=tuple(found),
    )


def _undisturbed(head: Head, campaign: Campaign, folder: pathlib.Path) -> pathlib.Path:
    settings = [*campaign.settings, *_episode_settings(campaign, folder)]
    if campaign.episodes:  # how many workers there are changes nothing, and one starts sooner
        settings.append("rollout.workers=1")
    job = DriverJob(head, folder, settings, campaign.patience, campaign.config)
    try:
        job.submit()
        _finish(job, campaign.steps)
    finally:
        job.end()
    return folder


def _disturbed(
    head: Head, campaign: Campaign, folder: pathlib.Path, points: pathlib.Path
) -> Iterator[Recovery]:
    """Yields as the run recovers from one fault after the other, and returns when it has ended."""
    settings = [*campaign.settings, *_episode_settings(campaign, folder)]
    if not campaign.episodes:
        injected = f"{{seconds: {SCORER_S}, hostile: {points / HOSTILE}}}"
        settings.append(f"reward.functions=[{{name: '{SCORER}', params: {injected}}}]")
    job = DriverJob(head, folder, settings, campaign.patience, campaign.config)
    injector = Injector(job, str(points), _steps_folder(folder))
    try:
        job.submit()
        for fault in campaign.faults:
            job.wait_for_step(fault.step, f"before fault {fault.number}")
            hit = injector.inject(fault)
            job.wait_for_step(hit.step + 1, f"after fault {fault.number}, {fault.kind.value}")
            yield Recovery(fault=fault, seconds=time.monotonic() - hit.at_s)
        injector.wait_for_scaling()
        _finish(job, campaign.steps)
    finally:
        job.end()


def _steps_folder(folder: pathlib.Path) -> pathlib.Path:
    """In which the environments of a run say that they are at a step."""
    return folder.with_name(f"{folder.name}.steps")


def _episode_settings(campaign: Campaign, folder: pathlib.Path) -> list[str]:
    """What only a run of episodes has on top of its configuration."""
    if not campaign.episodes:
        return []
    steps = _steps_folder(folder)
    steps.mkdir()
    return [
        f"data.train.source={folder.parent / RECORDS}",
        f"environment.params={{folder: {steps}, seconds: {STEP_S}}}",
        f"environment.timeout_s={CALL_S * campaign.patience:g}",
    ]


def _finish(job: DriverJob, steps: int) -> None:
    job.wait_for_step(steps, "before the last step")
    if job.wait(END_S * job.patience):
        job.check_running("at its end")


def _line(recovery: Recovery, count: int) -> str:
    fault = recovery.fault
    return (
        f"fault {fault.number:2}/{count}  step {fault.step:3}  {fault.kind.value:38}  "
        f"recovered in {recovery.seconds:5.1f} s"
    )


def _failed(hit: int, problems: Sequence[str]) -> Outcome:
    return Outcome(hit=hit, lost=0, duplicated=0, parameters_equal=False, problems=tuple(problems))


def clean(folder: pathlib.Path) -> None:
    """Removes the folder of a campaign that passed."""
    shutil.rmtree(folder, ignore_errors=True)
