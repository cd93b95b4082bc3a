"""The state of a run as the dashboard shows it, kept up to date and published to viewers.

One asyncio task polls the run's files twice a second, with `stat` alone while nothing changes. The
driver is asked for its fleet only while there are viewers. File reads and calls happen in threads,
one at a time, so that no viewer waits for another's search.
"""

import asyncio
import contextlib
import logging
import math
import pathlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from dashboard.prometheus import Exporter
from dashboard.runs.driver_client import DriverClient, no_fleet
from dashboard.runs.run_document import run_json
from dashboard.stream import Hub, Viewer
from diagnosis.compare.compare import compare
from diagnosis.compare.diffs import read_environment
from diagnosis.judgement.breakdown import critical_path
from diagnosis.judgement.judge import Judge
from diagnosis.records.facts import StepFacts
from diagnosis.records.run_log import Changes, RunLog
from diagnosis.records.samples_index import SampleIndex
from diagnosis.records.timeline import TimelineLog
from services.process.run_processes import state_of_run

POLL_S = 0.5
FLEET_S = 1.0
JUDGE_S = 10.0
"""A running run is judged again after this time without a new step: a missing step is an alert."""
CATCH_UP_STEPS = 20
"""More new steps than this at once are published as one `reload`."""
JUDGED_STEPS = 2000
"""Steps that are judged when a log is read from the start; older ones say little of the present."""
CLOSE_S = 6.0
"""Time for viewers to receive how the run ended."""
ASK_S = 5.0
"""Time for viewers to fetch views that they have not opened yet, before the server ends. A page
leaves once it has them."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
Event = tuple[str, Any]


class RunFollower:
    """Owns everything that is read from one run."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        hub: Hub | None = None,
        driver_is_gone: Callable[[Any], bool] = lambda pid: False,
        now: Callable[[], float] = time.time,
    ):
        """Reads nothing yet.

        Args:
            folder: of the run.
            hub: of the viewers.
            driver_is_gone: whether the driver with this process id has certainly ended.
            now: Unix seconds.
        """
        self.folder = folder
        self.hub = hub or Hub()
        self.log = RunLog(folder)
        self.samples = SampleIndex(folder)
        self.timeline = TimelineLog(folder, self.log)
        self.exporter = Exporter()
        self.compares = False
        """Whether the page compares this run with another one."""
        self.failure: Exception | None = None
        """The error that ended the task that polls the run."""
        self._judge: Judge | None = None
        self._settings = self.log.settings
        self._driver_is_gone = driver_is_gone
        self._now = now
        self._driver = DriverClient(folder)
        self._lock = asyncio.Lock()
        self._fleet = no_fleet("the driver has not been asked yet")
        self._fleet_at = 0.0
        self._judgement: dict[str, Any] | None = None
        self._published: dict[str, Any] | None = None
        """The judgement that viewers have."""
        self._state = ""
        self._ended_at = -math.inf
        """When the end of the run was published, by the monotonic clock."""
        self._environment: Mapping[str, Any] | None = None
        self._skipped: dict[str, int] = {}
        self._news: dict[str, Any] = {"timeline": {"step": None}}
        """What was published last about logs that a page loads on request."""

    async def read(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Calls a function that reads the run, in a thread, one at a time."""
        async with self._lock:
            return await asyncio.to_thread(function, *arguments, **named)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Polls the run and publishes news while the block runs."""
        task = asyncio.create_task(self._poll_forever())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _poll_forever(self) -> None:
        logged = ""
        while True:
            try:
                await self.publish_news()
                logged = ""
            except OSError as error:  # as on a network disk: the next poll may succeed
                if str(error) != logged:  # once, and not at every poll of a night
                    logged = str(error)
                    _log.warning("cannot read the run: %s", error)
            except Exception as error:  # the server ends with it
                self.failure = error
                raise
            await asyncio.sleep(POLL_S)

    async def publish_news(self) -> None:
        """Polls once, and publishes what is new."""
        for kind, data in await self.read(self.poll):
            self.hub.publish(kind, data)
        if self.hub.viewers and time.monotonic() - self._fleet_at >= FLEET_S:
            await self._ask_fleet()
        if self.hub.viewers:
            judgement = await self.read(self.judgement)
            if judgement is not self._published:
                self._published = judgement
                self.hub.publish("judgement", judgement)

    async def join(self) -> Viewer:
        """Adds a viewer, which first receives the run, its fleet and its judgement.

        Raises:
            TooManyViewers: see `Hub.join`.
        """
        await self.fleet()
        run, judgement = await self.read(lambda: (self.run(), self.judgement()))
        # Nothing is awaited from here on: what is published meanwhile would miss the viewer.
        first = (("run", run), ("fleet", self._fleet), ("judgement", judgement))
        return self.hub.join([self.hub.event(kind, data) for kind, data in first])

    async def close(self) -> None:
        """Publishes the last state, answers for ASK_S after the run's end, and ends every stream.

        It takes at most CLOSE_S.
        """
        if self.failure is None:
            with contextlib.suppress(OSError):  # then viewers keep what was known before
                await self.publish_news()
        deadline = time.monotonic() + CLOSE_S
        while self.hub.viewers and time.monotonic() < self._ended_at + ASK_S:
            await asyncio.sleep(0.02)
        self.hub.close()
        while self.hub.viewers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self._driver.close)

    async def fleet(self) -> dict[str, Any]:
        """The driver's answer, at most a second old."""
        if time.monotonic() - self._fleet_at >= FLEET_S:
            await self._ask_fleet()
        return self._fleet

    async def change_fleet(self, call: Callable[[DriverClient], T]) -> T:
        """Asks the driver for a change; raises what the call raises."""
        try:
            return await asyncio.to_thread(call, self._driver)
        finally:
            self._fleet_at = 0.0  # the next request shows the change

    def run(self) -> dict[str, Any]:
        """The document of /api/run; call it through `read`."""
        return run_json(
            self.log,
            self.folder,
            state=self._state or self._find_state(),
            can_control=(self.folder / "control" / "key.pem").exists(),
            environment=self._find_environment(),
            compare=self.compares,
            now=self._now(),
        )

    def judgement(self) -> dict[str, Any]:
        """The document of /api/judgement; call it through `read`."""
        if self._judgement is None:
            self._judgement = self._judged().verdict(
                self._now(), {**self.log.status, "state": self._state}
            )
        return self._judgement

    def _is_judgement_old(self) -> bool:
        if self._judgement is None or self._state != "running":
            return False
        return abs(self._now() - self._judgement["time"]) >= JUDGE_S

    def _judged(self) -> Judge:
        if self._judge is None:
            self._judge = Judge(self._settings)
        return self._judge

    def _judge_steps(self, changes: Changes) -> None:
        """Passes new steps to the judge; a new judge receives all of them after a reload."""
        steps = changes.new_steps
        if changes.reloaded or self.log.settings != self._settings:
            self._judge, self._settings = None, self.log.settings
            steps = self.log.recent(JUDGED_STEPS)
        for facts in steps[-JUDGED_STEPS:]:
            self._judged().add_step(facts)

    def poll(self) -> list[Event]:
        """Reads what the run has written since the last poll; returns the events to publish."""
        news = {
            "timeline": {"step": self.timeline.refresh()},
            "samples": {"total": self.samples.refresh()},
        }
        changes = self.log.refresh()
        self._log_skipped()
        state = self._find_state()
        events: list[Event] = []
        is_new = changes.reloaded or len(changes.new_steps) > CATCH_UP_STEPS
        if is_new:
            self.exporter.load(self.log)
        else:
            for facts in changes.new_steps:
                self.exporter.add_step(facts)
        self._judge_steps(changes)
        if is_new:
            events.append(("reload", {}))
        else:
            events += [("step", step_json(facts, facts.groups)) for facts in changes.new_steps]
        if changes.status_changed or state != self._state or changes.reloaded:
            if self._state == "running" != state:
                self._ended_at = time.monotonic()
            self._state = state
            events.append(("run", self.run()))
        if events or self._is_judgement_old():
            self._judgement = None
        events += [(kind, data) for kind, data in news.items() if data != self._news.get(kind)]
        self._news = news
        return events

    def _log_skipped(self) -> None:
        skipped = {name: count for name, count in self.log.skipped.items() if count}
        if skipped and skipped != self._skipped:
            _log.warning("skipped invalid lines, by file: %s", skipped)
        self._skipped = skipped

    async def _ask_fleet(self) -> None:
        self._fleet_at = time.monotonic()
        if self._state in ("running", ""):
            fleet = await asyncio.to_thread(self._driver.fleet)
        else:
            fleet = no_fleet(f"the run is {self._state}: its workers have ended")
        if fleet == self._fleet:
            return
        self._fleet = fleet
        self.hub.publish("fleet", fleet)
        async with self._lock:
            workers = fleet["workers"]
            self._judged().set_workers(
                starting=any(worker["state"] == "starting" for worker in workers),
                hosts=len({worker["host"] for worker in workers if worker["host"]}),
            )
            self._judgement = None

    def compare_with(
        self, other: "RunFollower", first: int | None, last: int | None, points: int
    ) -> dict[str, Any]:
        """The document of /api/compare; the other run is read only now. Call it through `read`.

        Raises:
            ValueError: for an impossible range or number of points.
        """
        other.poll()
        found = compare(self.log, other.log, first=first, last=last, points=points)
        return {"runs": [self.run(), other.run()], **found}

    def _find_state(self) -> str:
        status = self.log.status
        running = status.get("state", "running") == "running"
        if running and self._driver_is_gone(status.get("pid")):
            return "lost"
        return state_of_run(self.folder, status)

    def _find_environment(self) -> Mapping[str, Any] | None:
        if self._environment is None:
            self._environment = read_environment(self.folder) or None
        return self._environment


def step_json(facts: StepFacts, groups: Any) -> dict[str, Any]:
    """The document of /api/step/N; `groups` by state, as ids or as counts."""
    return {
        "step": facts.step,
        "time": facts.time,
        "wall_s": facts.wall_s,
        "metrics": dict(facts.metrics),
        "processes": {name: dict(row) for name, row in facts.processes.items()},
        "overlap_s": dict(facts.overlap_s),
        "absent_s": dict(facts.absent_s),
        "path": critical_path(facts),
        "groups": groups,
        "outstanding": facts.outstanding,
        "warnings": list(facts.warnings),
    }
