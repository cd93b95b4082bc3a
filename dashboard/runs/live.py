"""What the dashboard knows of a run, kept up to date, and told to whoever watches.

One asyncio task looks at the run's files about twice a second, by `stat` alone while nothing has
changed. The driver is asked for its fleet only while somebody watches. Work on files and calls
happen in threads, one at a time, so that no viewer waits for another's search.
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
from dashboard.runs.fleet_link import FleetLink, absent
from dashboard.runs.run_document import run_json
from dashboard.stream import Hub, Viewer
from diagnosis.compare.diffs import read_environment
from diagnosis.judgement.breakdown import critical_path
from diagnosis.judgement.judge import Judge
from diagnosis.records.facts import StepFacts
from diagnosis.records.run_log import Changes, RunLog
from diagnosis.records.samples_index import SampleIndex
from diagnosis.records.spans import Spans
from services.process.run_processes import state_of_run

TURN_S = 0.5
FLEET_S = 1.0
JUDGE_S = 10.0
"""After which a run that goes on is judged anew though nothing came: that may be the news."""
CATCH_UP_STEPS = 20
"""More new steps than that at once are told as one `reload`."""
JUDGED_STEPS = 2000
"""Most steps that are judged where a log is read anew; those before say little of the present."""
CLOSE_S = 1.5
"""For viewers to read how the run ended."""
ASK_S = 1.0
"""Of that, for viewers to fetch what they have not opened yet: nobody answers them afterwards."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
Event = tuple[str, Any]


class Live:
    """Owns everything that is read of one run."""

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
            driver_is_gone: says for certain that the driver with this process id is there no more.
            now: Unix seconds.
        """
        self.folder = folder
        self.hub = hub or Hub()
        self.log = RunLog(folder)
        self.samples = SampleIndex(folder)
        self.spans = Spans(folder, self.log)
        self.exporter = Exporter()
        self.compares = False
        """Whether the page shows this run beside another one."""
        self.failure: Exception | None = None
        """What ended the task that keeps this up to date."""
        self._judge: Judge | None = None
        self._settings = self.log.settings
        self._driver_is_gone = driver_is_gone
        self._now = now
        self._link = FleetLink(folder)
        self._lock = asyncio.Lock()
        self._fleet = absent("the driver was not asked yet")
        self._fleet_at = 0.0
        self._judgement: dict[str, Any] | None = None
        self._told: dict[str, Any] | None = None
        """The judgement that viewers have."""
        self._state = ""
        self._ended_at = -math.inf
        """By the monotonic clock; when viewers were told that the run is over."""
        self._environment: Mapping[str, Any] | None = None
        self._skipped: dict[str, int] = {}
        self._news: dict[str, Any] = {"timeline": {"step": None}}
        """What was told last of the logs that are shown when somebody asks for them."""

    async def read(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Calls a function that reads the run, in a thread, while nothing else does."""
        async with self._lock:
            return await asyncio.to_thread(function, *arguments, **named)

    @contextlib.asynccontextmanager
    async def kept_up(self) -> AsyncIterator[None]:
        """Looks, and tells, for as long as the block runs."""
        task = asyncio.create_task(self._keep_up())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _keep_up(self) -> None:
        said = ""
        while True:
            try:
                await self.turn()
                said = ""
            except OSError as error:  # as on a network disk: the next look may succeed
                if str(error) != said:  # once, and not at every turn of a night
                    said = str(error)
                    _log.warning("cannot read the run: %s", error)
            except Exception as error:  # for the server, which ends with it
                self.failure = error
                raise
            await asyncio.sleep(TURN_S)

    async def turn(self) -> None:
        """Looks once, and tells every viewer what is new."""
        for kind, data in await self.read(self.look):
            self.hub.publish(kind, data)
        if self.hub.viewers and time.monotonic() - self._fleet_at >= FLEET_S:
            await self._ask_fleet()
        if self.hub.viewers:
            judgement = await self.read(self.judgement)
            if judgement is not self._told:  # whoever asked for it first
                self._told = judgement
                self.hub.publish("judgement", judgement)

    async def join(self) -> Viewer:
        """Adds a viewer, which first gets the run, its fleet and its judgement.

        Raises:
            TooManyViewers: see `Hub.join`.
        """
        run, judgement = await self.read(lambda: (self.run(), self.judgement()))
        fleet = await self.fleet()
        first = (("run", run), ("fleet", fleet), ("judgement", judgement))
        return self.hub.join([self.hub.event(kind, data) for kind, data in first])

    async def close(self) -> None:
        """Tells how the run stands now, answers for ASK_S after its end, and ends every stream,
        within CLOSE_S.
        """
        if self.failure is None:
            with contextlib.suppress(OSError):  # then they read what was known before
                await self.turn()
        deadline = time.monotonic() + CLOSE_S
        while self.hub.viewers and time.monotonic() < self._ended_at + ASK_S:
            await asyncio.sleep(0.02)
        self.hub.close()
        while self.hub.viewers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self._link.close)

    async def fleet(self) -> dict[str, Any]:
        """What the driver said within the last second."""
        if time.monotonic() - self._fleet_at >= FLEET_S:
            await self._ask_fleet()
        return self._fleet

    async def change(self, call: Callable[[FleetLink], T]) -> T:
        """Asks the driver for a change; raises what the call raises."""
        try:
            return await asyncio.to_thread(call, self._link)
        finally:
            self._fleet_at = 0.0  # whoever looks next is to see it

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
        """Gives new steps to the judge; all of them to a new one where the old one's are void."""
        steps = changes.new_steps
        if changes.reloaded or self.log.settings != self._settings:
            self._judge, self._settings = None, self.log.settings
            steps = self.log.recent(JUDGED_STEPS)
        for facts in steps[-JUDGED_STEPS:]:
            self._judged().add(facts)

    def look(self) -> list[Event]:
        """Takes up what the run has written since; returns what is to be told. `turn` does it."""
        news = {
            "timeline": {"step": self.spans.refresh()},
            "samples": {"total": self.samples.refresh()},
        }
        changes = self.log.refresh()
        self._tell_skipped()
        state = self._find_state()
        events: list[Event] = []
        is_new = changes.reloaded or len(changes.new_steps) > CATCH_UP_STEPS
        if is_new:
            self.exporter.load(self.log)
        else:
            for facts in changes.new_steps:
                self.exporter.add(facts)
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

    def _tell_skipped(self) -> None:
        skipped = {name: count for name, count in self.log.skipped.items() if count}
        if skipped and skipped != self._skipped:
            _log.warning("lines that could not be used, by file: %s", skipped)
        self._skipped = skipped

    async def _ask_fleet(self) -> None:
        self._fleet_at = time.monotonic()
        if self._state in ("running", ""):
            fleet = await asyncio.to_thread(self._link.look)
        else:
            fleet = absent(f"the run is {self._state}: its workers are gone")
        if fleet == self._fleet:
            return
        self._fleet = fleet
        self.hub.publish("fleet", fleet)
        async with self._lock:
            self._judged().set_fleet(fleet if fleet["available"] else None)
            self._judgement = None

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
