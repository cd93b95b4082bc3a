"""The thread that feeds one child process with jobs, and decides what the child's end means.

A plain scorer has one job at a time; async scorers have several in flight. A job that was alone in
its child and ran out of time fails; one that was alone when the child died is tried once more: the
cause may be outside, such as a lack of memory, and a reward must not depend on that. Where several
were in flight, or the environment of an episode that had ended was being closed, the end of the
child or its standstill says nothing about any of them: each is scored again alone, by the same
rule. The child is replaced, and nothing else is affected.
"""

import collections
import dataclasses
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

from rollout_worker.rewards.processes.reward_process import ChildFailed, RewardProcess
from rollout_worker.rewards.processes.reward_replies import BadReply, parse_score_reply, read_id
from rollout_worker.rewards.scorers import BUILT_INS, ScorerKind
from rollout_worker.rewards.spending import SpendingAccount

log = logging.getLogger(__name__)

STANDSTILL_S = 2.0
"""After the time limit of an async scorer, until the child must have said that it was reached."""
_NEXT_JOB_S = 0.02
"""At most, until a job is seen that arrives while others are in flight."""
MOST_TRIES = 3
"""Of a job: in company, and twice alone."""
_MOST_LATE = 8
"""Calls that were cancelled at their time limit in one child: each may have left a thread."""


@dataclasses.dataclass
class Outcome:
    """What the scorers of one job made of its completions."""

    rewards: dict[str, tuple[dict[str, float], ...]] = dataclasses.field(default_factory=dict)
    """By scorer, for each completion: by the scorer's name, and `name/variant`."""
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    """By scorer, how it failed."""
    notes: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """By scorer that has any, for each completion."""
    answer: Mapping[str, Any] | None = None
    """Of an environment, in place of rewards."""


@dataclasses.dataclass(eq=False)
class Job:
    """A request to scorers of one kind, with the completions of a group, or one."""

    scorers: tuple[str, ...]
    completions: tuple[str, ...]
    answer: str
    prompt: str
    item: Mapping[str, Any]
    future: Future[Outcome] = dataclasses.field(default_factory=Future)
    apart: bool = False
    """Nothing else may be in flight beside it."""
    ends_another: bool = False
    """It has the child end another job, so that it is sent while the pool closes as well."""
    deaths: int = 0
    """Children that have died while they had this job alone."""


@dataclasses.dataclass(frozen=True)
class JobQueue:
    """Jobs of one kind, for several threads."""

    in_flight: int
    """Jobs that a child has at once."""
    patience_s: float
    """After the time limit, until a child that says nothing is killed."""
    jobs: queue.SimpleQueue = dataclasses.field(default_factory=queue.SimpleQueue)
    """None ends one thread."""


@dataclasses.dataclass(eq=False)
class _Flight:
    """A job that a child has."""

    job: Job
    deadline_s: float
    alone: bool
    """No other was in flight at any time since it was sent, and nothing was being closed then."""
    closings: int
    """Episodes that had ended in the child when it was sent."""
    left: collections.deque[str]
    """Scorers that have not answered."""
    outcome: Outcome


class ScorerThread(threading.Thread):
    """Owns one child, which ends with it."""

    def __init__(
        self,
        name: str,
        *,
        start_child: Callable[[], RewardProcess],
        timeout_s: float,
        closed: threading.Event,
        account: SpendingAccount,
    ):
        """Args:
        start_child: called in this thread; returns a child that is ready.
        timeout_s: bound on all scorers of one job together.
        closed: set when what is not in flight is to fail.
        account: gets what the scorers spend; where it refuses, those that spend are not run.
        """
        super().__init__(name=name, daemon=True)
        self.ready: Future[dict[str, ScorerKind]] = Future()
        """The kinds of the scorers, once the child is ready."""
        self.child: RewardProcess | None = None
        self.scored = 0
        """Completions, once for each of their jobs."""
        self._start_child = start_child
        self._timeout_s = timeout_s
        self._closed = closed
        self._account = account
        self._lane: Future[JobQueue] = Future()
        self._flights: dict[str, _Flight] = {}
        self._again: collections.deque[Job] = collections.deque()
        self._late = 0
        self._closings = self._closed_by_now = 0
        """Episodes that have ended in the child, and those of them whose environment is known not
        to keep the child any more: it has answered what was sent later."""
        self._worn = False
        """The child is to be replaced once nothing is in flight."""
        self._ending = False

    def serve(self, lane: JobQueue) -> None:
        """Says whose jobs this thread takes, once."""
        self._lane.set_result(lane)

    def end(self) -> None:
        """Ends the thread if it has no lane; None in the jobs ends one that has."""
        self._lane.cancel()

    def run(self) -> None:
        """Starts the child, then serves a lane until it ends."""
        try:
            child = self._restart()
        except (ValueError, RuntimeError, OSError) as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(child.kinds)
        try:
            lane = self._lane.result()
        except CancelledError:
            self.kill_child()
            return
        while self._fill(lane):
            try:
                self._receive(lane)
            except BaseException as error:  # raised in the thread that waits for these scores
                for flight in self._flights.values():
                    flight.job.future.set_exception(error)
                self._flights.clear()
                self.kill_child()
        self.kill_child()

    def kill_child(self) -> None:
        """Kills the child, if there is one."""
        child, self.child = self.child, None
        self._late, self._worn = 0, False
        self._closings = self._closed_by_now = 0
        if child is not None:
            child.kill()

    def _restart(self) -> RewardProcess:
        self.kill_child()
        self.child = child = self._start_child()
        return child

    def _fill(self, lane: JobQueue) -> bool:
        """Sends jobs while there is room; waits for one where nothing is in flight.

        Returns:
            whether anything is in flight; if not, the thread ends.
        """
        while self._has_room(lane):
            if self._again:
                self._send(self._again.popleft(), lane)
                continue
            try:
                job = lane.jobs.get(block=not self._flights)
            except queue.Empty:
                break
            if job is None:
                self._ending = True
            else:
                self._send(job, lane)
        return bool(self._flights)

    def _has_room(self, lane: JobQueue) -> bool:
        if not self._flights:
            return bool(self._again) or not self._ending
        held_back = self._again or self._worn or self._ending
        apart = any(flight.job.apart for flight in self._flights.values())
        return not held_back and not apart and len(self._flights) < lane.in_flight

    def _send(self, job: Job, lane: JobQueue) -> None:
        request_id = secrets.token_hex(8)
        outcome = Outcome(errors=self._refused(job))
        scorers = [name for name in job.scorers if name not in outcome.errors]
        if not scorers:
            job.future.set_result(outcome)
            return
        try:
            if self._closed.is_set() and not (job.ends_another and self._flights):
                raise RuntimeError("the reward pool was closed before this completion was scored")
            child = self.child
            if not self._flights and (child is None or self._worn or not child.alive):
                child = self._restart()
            assert child is not None
            for other in self._flights.values():
                other.alone = False
            deadline_s = time.monotonic() + self._timeout_s + lane.patience_s
            self._flights[request_id] = _Flight(
                job,
                deadline_s,
                not self._flights and self._closed_by_now == self._closings,
                self._closings,
                collections.deque(scorers),
                outcome,
            )
            message = {
                "scorers": scorers,
                "completions": job.completions,
                "answer": job.answer,
                "prompt": job.prompt,
                "item": dict(job.item),
                "timeout_s": self._timeout_s,
            }
            child.send(message, request_id, deadline_s)
        except (TimeoutError, ChildFailed) as failure:
            self._end_child(failure)
        except BaseException as error:  # raised in the thread that waits for this score
            self._flights.pop(request_id, None)
            job.future.set_exception(error)

    def _refused(self, job: Job) -> dict[str, str]:
        """Why scorers of a job are not to run, by name."""
        why = self._account.refusal
        spending = [name for name in job.scorers if name in BUILT_INS and BUILT_INS[name].spends]
        return dict.fromkeys(spending, f"not asked, since {why}") if why else {}

    def _receive(self, lane: JobQueue) -> None:
        """Takes one line of the child, or waits for it until there may be another job to send."""
        child = self.child
        if child is None:
            raise RuntimeError("the reward pool was closed while this completion was scored")
        deadline_s = until_s = min(flight.deadline_s for flight in self._flights.values())
        if self._has_room(lane):
            until_s = min(until_s, time.monotonic() + _NEXT_JOB_S)
        most = max(len(flight.job.completions) for flight in self._flights.values())
        try:
            self._record(child.read_line(until_s, most))
        except TimeoutError as failure:
            if time.monotonic() >= deadline_s:
                self._end_child(failure)
        except BadReply as error:
            self._end_child(ChildFailed(f"child sent {error}"))
        except ChildFailed as failure:
            self._end_child(failure)

    def _record(self, line: bytes) -> None:
        """Records what one scorer made of the request that a line answers."""
        request_id = read_id(line)
        if request_id not in self._flights:
            raise BadReply(f"{line[:80]!r}, which answers another request")
        flight = self._flights[request_id]
        job, name = flight.job, flight.left[0]
        reply = parse_score_reply(line, request_id, name, len(job.completions))
        self._account.add_spending(reply.spent)
        if reply.doubtful and not job.apart:
            log.warning(
                "%s: %s; it is scored again with nothing beside it, since others may be the cause",
                name,
                reply.error,
            )
            del self._flights[request_id]
            self._worn = True
            self._score_apart(job)
            return
        flight.left.popleft()
        self._closed_by_now = max(self._closed_by_now, flight.closings)
        self._closings += job.ends_another or bool((reply.answer or {}).get("done"))
        if reply.error:
            flight.outcome.errors[name] = reply.error
        elif reply.answer is not None:
            flight.outcome.answer = reply.answer
        else:
            flight.outcome.rewards[name] = reply.rewards
            if reply.notes:
                flight.outcome.notes[name] = reply.notes
        if reply.late:
            flight.left.clear()
            self._late += 1
            self._worn = self._worn or self._late >= _MOST_LATE or job.apart
        if not flight.left:
            del self._flights[request_id]
            self._finish(flight)

    def _end_child(self, failure: Exception) -> None:
        """Kills the child, and decides what becomes of the jobs in flight."""
        flights = list(self._flights.values())
        self._flights.clear()
        self.kill_child()
        late = isinstance(failure, TimeoutError)
        problem = f"no result within {self._timeout_s:g} s, child killed" if late else str(failure)
        first = flights[0]
        if not first.alone:
            log.warning(
                "a reward process with %d completions or groups in flight ended: %s; each is "
                "scored again alone",
                len(flights),
                problem,
            )
            for flight in flights:
                self._score_apart(flight.job)
        elif late or first.job.deaths:
            first.outcome.errors[first.left[0]] = problem
            self._finish(first)
        else:
            log.warning("a reward process died: %s; the completion is scored again", problem)
            first.job.deaths += 1
            self._score_apart(first.job)

    def _score_apart(self, job: Job) -> None:
        job.apart = True
        self._again.append(job)

    def _finish(self, flight: _Flight) -> None:
        self.scored += len(flight.job.completions)
        flight.job.future.set_result(flight.outcome)
