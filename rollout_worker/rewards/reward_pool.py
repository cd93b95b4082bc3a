"""Child processes that score completions under a wall-clock bound.

Each child is fed by a thread of its own (`scorer_thread.py`). Plain scorers and async ones have
children of their own, so that neither waits for the other. A completion whose scorer takes too long
gets an error that names the scorer; so does one at which the child dies twice. No other completion
is affected; a group scorer fails for all completions of its group. Nothing here depends on signals,
so the pool may be used from any thread.
"""

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_worker.config.reward_config import RewardConfig, RewardFunctionConfig
from rollout_worker.rewards.composition import Combine, Composition
from rollout_worker.rewards.processes.reward_process import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    USUAL,
    Allowance,
    RewardProcess,
)
from rollout_worker.rewards.processes.scorer_output import ScorerOutput
from rollout_worker.rewards.processes.scorer_thread import (
    MOST_TRIES,
    STANDSTILL_S,
    Job,
    JobQueue,
    Outcome,
)
from rollout_worker.rewards.processes.scorer_threads import ScorerThreads
from rollout_worker.rewards.reward_values import ValueNames
from rollout_worker.rewards.scorers import ScorerKind
from rollout_worker.rewards.spending import SpendingAccount

IN_FLIGHT = RewardConfig().in_flight


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """One completion to score, with the prompt's data for its scorers."""

    completion: str
    answer: str
    prompt: str
    item: Mapping[str, Any]
    """The record of the source; JSON values only."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The rewards of one completion."""

    rewards: dict[str, float]
    """By scorer name, and by `name/variant` for values that are only logged. Scorers that failed
    are left out."""
    total: float
    """Of the rewards, by the rule of `composition.py`; NaN if `error` is not empty."""
    error: str
    """Empty, or which scorer failed and how."""
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """What scorers say of their rewards, by name of those that say anything."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """A job, and the places of its completions in the submission."""

    job: Job
    places: range
    lane: JobQueue


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Scorers that run together."""

    scorers: tuple[str, ...]
    is_group: bool
    lane: JobQueue


class PendingScores:
    """Scores of several completions, which become ready in the background."""

    def __init__(
        self, pool: "RewardPool", completions: int, parts: Sequence[_Part], bound_s: float
    ):
        self._pool = pool
        self._completions = completions
        self._parts = parts
        self._bound_s = bound_s
        self._deadline_s = time.monotonic() + bound_s

    @property
    def done(self) -> bool:
        """Whether all scores are ready."""
        return all(part.job.future.done() for part in self._parts)

    def wait_done(self, timeout_s: float | None) -> None:
        """Waits until all scores are ready, at most `timeout_s`; None takes the scorers' bound."""
        left_s = max(0.0, self._deadline_s - time.monotonic())
        concurrent.futures.wait(
            [part.job.future for part in self._parts],
            left_s if timeout_s is None else min(timeout_s, left_s),
        )
        if time.monotonic() >= self._deadline_s:
            self.wait()  # raises an error that names the threads

    def wait(self) -> list[Score]:
        """One score per item, in the order of the items.

        Raises:
            TypeError, ValueError: if an item holds something that is no JSON value.
            RuntimeError: if a child that died cannot be replaced, or the pool was closed meanwhile.
        """
        rewards: list[dict[str, dict[str, float]]] = [{} for _ in range(self._completions)]
        errors: list[dict[str, str]] = [{} for _ in range(self._completions)]
        notes: list[dict[str, str]] = [{} for _ in range(self._completions)]
        for part in self._parts:
            outcome = self._outcome(part.job)
            for index, place in enumerate(part.places):
                errors[place] |= outcome.errors
                for name, entries in outcome.rewards.items():
                    rewards[place][name] = entries[index]
                for name, texts in outcome.notes.items():
                    if texts[index]:
                        notes[place][name] = texts[index]
        return [self._pool.score_of(*one) for one in zip(rewards, errors, notes, strict=True)]

    def _outcome(self, job: Job) -> Outcome:
        try:
            return job.future.result(timeout=max(0.0, self._deadline_s - time.monotonic()))
        except TimeoutError:
            raise RuntimeError(
                f"no scorer thread answered for {self._completions} completions within "
                f"{self._bound_s:g} s: {self._pool.thread_names}"
            ) from None


class RewardPool:
    """Scores completions with a fixed set of functions in a fixed number of processes."""

    def __init__(
        self,
        functions: Sequence[RewardFunctionConfig],
        *,
        processes: int,
        timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
        allowance: Allowance = USUAL,
        in_flight: int = IN_FLIGHT,
        combine: Combine = "sum",
        account: SpendingAccount | None = None,
    ):
        """Starts the processes and waits until each has loaded all scorers.

        Args:
            functions: the scorers, in the order in which they run; names differ.
            processes: children, each with its own copy of the scorers' modules; as many again
                where some scorers are async and some are not.
            timeout_s: bound on all scorers of one completion together; on those of a group, and on
                async ones, apart.
            start_timeout_s: bound on the start of a child.
            allowance: what each child gets.
            in_flight: completions or groups that a child has at once, with async scorers.
            combine: how the rewards become a total.
            account: gets what the scorers spend, and says whether they may; None is one of its own.

        Raises:
            ValueError: if a scorer cannot be loaded.
            RuntimeError: if a child dies at its start or takes too long.
        """
        self._composition = Composition.of(functions, combine)
        self._names_of_scorers = tuple(function.name for function in functions)
        self.output = ScorerOutput()
        self.account = account or SpendingAccount()
        """What the scorers spend, and whether they may."""
        self._functions = tuple(functions)
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._value_names = ValueNames()
        self._threads = ScorerThreads(
            "scorer",
            lambda: RewardProcess(self._functions, allowance, self.output),
            timeout_s=timeout_s,
            start_timeout_s=start_timeout_s,
            account=self.account,
        )
        try:
            threads, kinds = self._threads.start(processes)
            one_by_one = JobQueue(in_flight=1, patience_s=0.0)
            at_once = JobQueue(in_flight=in_flight, patience_s=STANDSTILL_S)
            named = [(name, kinds[name]) for name in self._names_of_scorers]
            self._plans = [
                _Plan(names, is_group, lane)
                for lane in (one_by_one, at_once)
                for is_group in (False, True)
                if (
                    names := tuple(
                        name
                        for name, kind in named
                        if kind == ScorerKind(is_async=lane is at_once, is_group=is_group)
                    )
                )
            ]
            for lane in dict.fromkeys(plan.lane for plan in self._plans):
                self._threads.serve(threads or self._threads.start(processes)[0], lane)
                threads = []
        except BaseException:
            self.close()
            raise

    @property
    def scored(self) -> int:
        """Completions whose scoring has ended, since the start; once for each kind of scorer."""
        return self._threads.scored

    @property
    def thread_names(self) -> list[str]:
        """Of the threads that feed the children."""
        return self._threads.names

    def score_of(
        self,
        rewards: Mapping[str, Mapping[str, float]],
        errors: Mapping[str, str],
        notes: dict[str, str],
    ) -> Score:
        """The score of one completion, from what each scorer returned or how it failed."""
        named = {}
        for name in self._names_of_scorers:
            named |= self._value_names.known(name, rewards.get(name, {}))
        if errors:
            told = [f"{name}: {errors[name]}" for name in self._names_of_scorers if name in errors]
            return Score(named, math.nan, "; ".join(told), notes)
        try:
            return Score(named, self._composition.total(named), "", notes)
        except ValueError as error:
            return Score(named, math.nan, str(error), notes)

    def submit(self, items: Sequence[ScoreRequest]) -> "PendingScores":
        """Starts to score completions and returns at once; safe from any thread.

        Args:
            items: in any number; to a group scorer they are one group, so that they must be of one
                prompt where a scorer is one.

        Raises:
            RuntimeError: if the pool is closed.
            ValueError: if a scorer is a group scorer, and the items are of several prompts.
        """
        if self._threads.closed:
            raise RuntimeError("the reward pool is closed")
        parts: list[_Part] = []
        for plan in self._plans:
            parts += _group_parts(plan, items) if plan.is_group else _single_parts(plan, items)
        for part in parts:
            part.lane.jobs.put(part.job)
        # The threads enforce the bounds themselves; this one turns a lost thread into an error.
        lanes = self._threads.lanes
        in_flight = sum(lane.in_flight for lane in lanes)
        waiting = sum(lane.jobs.qsize() for lane in set(lanes)) + len(parts) + in_flight
        per_try_s = self._timeout_s + STANDSTILL_S + self._start_timeout_s + 2 * STOP_TIMEOUT_S
        return PendingScores(self, len(items), parts, waiting * MOST_TRIES * per_try_s)

    def close(self) -> None:
        """Ends the threads and kills the children; safe to call twice."""
        self._threads.close()


def _single_parts(plan: _Plan, items: Sequence[ScoreRequest]) -> list[_Part]:
    return [
        _Part(
            Job(plan.scorers, (one.completion,), one.answer, one.prompt, one.item),
            range(place, place + 1),
            plan.lane,
        )
        for place, one in enumerate(items)
    ]


def _group_parts(plan: _Plan, items: Sequence[ScoreRequest]) -> list[_Part]:
    if not items:
        return []
    first = items[0]
    for one in items:
        if (one.answer, one.prompt, one.item) != (first.answer, first.prompt, first.item):
            raise ValueError(
                f"{', '.join(plan.scorers)} scores the completions of one prompt, but was given "
                f"those of {first.prompt[:40]!r} and {one.prompt[:40]!r}: submit them apart"
            )
    texts = tuple(one.completion for one in items)
    job = Job(plan.scorers, texts, first.answer, first.prompt, first.item)
    return [_Part(job, range(len(items)), plan.lane)]


def validate_functions(
    functions: Sequence[RewardFunctionConfig],
    *,
    timeout_s: float = START_TIMEOUT_S,
    allowance: Allowance = USUAL,
) -> None:
    """Checks names, imports and parameters of scorers in a child process that then ends.

    Raises:
        ValueError: if a scorer cannot be loaded, with the reason and what to do.
        RuntimeError: if loading it kills the child or takes longer than `timeout_s`.
    """
    child = RewardProcess(functions, allowance)
    child.wait_ready(timeout_s)
    child.kill()
