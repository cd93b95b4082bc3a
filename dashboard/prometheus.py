"""A run's numbers in the text format of Prometheus.

Every metric of metrics.jsonl is exported with its latest value: `train/kl` is `tandem_train_kl`,
and a placeholder of the catalog is a label: `mem/rollout-0/host_bytes` is
`tandem_mem_host_bytes{process="rollout-0"}`. NaN and infinity are exported unchanged. There are
also numbers of the run itself, and of its fleet while the driver answers; docs/metrics.md
(`catalog_report.py`) lists all.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diagnosis.catalog import catalog
from diagnosis.records.columns import number
from diagnosis.records.facts import StepFacts
from diagnosis.records.run_log import RunLog
from services.control.messages import WorkerState
from services.process.phases import PHASES
from services.wire.strict_json import encodable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("running", "finished", "failed", "interrupted", "lost")
_WORKER_NUMBERS = {
    "policy_version": "Policy version of a worker; -1 before the first.",
    "restarts": "Restarts of a worker.",
    "groups_leased": "Groups that are leased to a worker.",
    "groups_done": "Groups of a worker that the learner accepted in this run.",
    "tokens_per_s": "Completion tokens per second of a worker, as last measured.",
    "slots": "Completions that a worker can decode at once.",
    "host_bytes": "Resident memory of a worker's process.",
    "device_bytes": "Device memory in use, summed over the devices of a worker.",
    "device_peak_bytes": "Peak of the memory in use on each device of a worker, summed.",
    "pull_gb_per_s": "Rate of a worker's last pull of weights, in GB/s.",
}
"""Exported numbers of each worker, with their help texts."""
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]+")


def family_name(row: catalog.Metric) -> str:
    """The exported name of a catalog row; each placeholder is a label.

    That of a held-out set leaves its word in the name, since a run with one set has the same
    metrics without it.
    """
    return _prefixed(catalog.BRACES.sub("/", row.name.replace("{set}", "set")))


def exposed(name: str) -> tuple[str, dict[str, str]]:
    """Exported name and labels of a metric of the log."""
    row = catalog.find(name)
    if row is None:
        return _prefixed(name), {}
    return family_name(row), row.read(name) or {}


class Exporter:
    """Accumulates the steps of a run; after a rewind, `load` replaces what was added."""

    def __init__(self):
        self._latest: dict[str, float] = {}
        self._seconds: dict[tuple[str, str], float] = {}
        self._wall_s = 0.0
        self._last: StepFacts | None = None

    def add_step(self, facts: StepFacts) -> None:
        """Adds a step; steps come in order."""
        self._last = facts
        self._latest.update(facts.metrics)
        self._wall_s += facts.wall_s
        for process, phases in facts.processes.items():
            for phase, seconds in phases.items():
                key = (process, phase)
                self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def load(self, log: RunLog) -> None:
        """Replaces what was added by all known steps of a log, without building each step."""
        self._last = next(iter(log.recent(1)), None)
        self._wall_s = float(np.nansum(log.column("wall_s")))
        self._seconds = {
            (process, phase): seconds
            for process in log.processes
            for phase, seconds in zip(
                PHASES, np.nansum(log.seconds(process), axis=0).tolist(), strict=True
            )
        }
        self._latest = {}
        for name in log.metric_names:
            column = log.column(name)
            measured = np.union1d(np.flatnonzero(~np.isnan(column)), log.nonfinite(name))
            if len(measured):
                self._latest[name] = float(column[int(measured[-1])])

    def text(
        self,
        run: Mapping[str, Any],
        fleet: Mapping[str, Any],
        *,
        viewers: int = 0,
        dropped: int = 0,
    ) -> bytes:
        """The whole page.

        Args:
            run: as /api/run says.
            fleet: as /api/fleet says.
            viewers, dropped: of the event stream.
        """
        registry = CollectorRegistry(auto_describe=False)
        families = self.families(run, fleet, viewers=viewers, dropped=dropped)
        families += self._of_log({family.name for family in families})
        registry.register(_Collected(families))
        return generate_latest(registry)

    def families(
        self, run: Mapping[str, Any], fleet: Mapping[str, Any], *, viewers: int, dropped: int
    ) -> list[Metric]:
        """The families other than metrics of the log; arguments as for `text`."""
        return [
            *self._of_run(run),
            *_of_fleet(fleet),
            _gauge("tandem_viewers", "Open pages of this dashboard.", viewers),
            _counter(
                "tandem_viewers_dropped",
                "Pages that were disconnected because they read too slowly.",
                dropped,
            ),
        ]

    def _of_run(self, run: Mapping[str, Any]) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "tandem_run_info", "Name and id of the run.", labels=("run", "run_id")
        )
        info.add_metric([_clean(run["run"]), _clean(run["run_id"])], 1)
        yield info
        state = GaugeMetricFamily("tandem_run_state", "State of the run.", labels=("state",))
        for one in STATES:
            state.add_metric([one], float(one == run["state"]))
        yield state
        yield _gauge("tandem_run_step", "The last closed step.", run["step"])
        yield _gauge("tandem_run_steps", "Configured number of steps.", run["steps_total"])
        if math.isfinite(started := number(run["started"])):
            yield _gauge(
                "tandem_run_start_time_seconds", "Start of the run, Unix seconds.", started
            )
        if self._last is not None:
            closed = "Close of the last step, Unix seconds."
            yield _gauge("tandem_step_close_time_seconds", closed, self._last.time)
        yield _counter("tandem_wall_seconds", "Wall time of all closed steps.", self._wall_s)
        phases = CounterMetricFamily(
            "tandem_phase_seconds",
            "Seconds of all closed steps by process and phase of the ledger.",
            labels=("process", "phase"),
        )
        for (process, phase), seconds in sorted(self._seconds.items()):
            phases.add_metric([_clean(process), _clean(phase)], seconds)
        yield phases

    def _of_log(self, taken: Collection[str]) -> Iterator[Metric]:
        families: dict[str, dict[str, tuple[dict[str, str], float]]] = {}
        for name, value in sorted(self._latest.items()):
            shown, labels = exposed(name)
            if shown.removesuffix("_total") in taken:
                shown = _prefixed(f"log/{name}")
            families.setdefault(shown, {})[name] = (labels, value)
        for shown, members in families.items():
            # Names of the log that differ only in characters which Prometheus does not allow, or
            # that share their literal text, get one more label.
            labelled = [tuple(sorted(labels.items())) for labels, _ in members.values()]
            alike = {tuple(key for key, _ in one) for one in labelled}
            apart = len(set(labelled)) == len(labelled) and len(alike) == 1
            first = next(iter(members))
            row = catalog.find(first)
            about = f"{row.title}: {row.description}" if row else f"{_clean(first)} of the log"
            family = GaugeMetricFamily(
                shown, about + (f" [{row.unit}]" if row and row.unit else "")
            )
            for name, (labels, value) in members.items():
                extra = {} if apart else {"metric": _clean(name)}
                shown_labels = {key: _clean(one) for key, one in labels.items()} | extra
                family.add_sample(shown, shown_labels, value)
            yield family


class _Collected:
    """Prepared families, in the form that a registry collects."""

    def __init__(self, families: Iterable[Metric]):
        self._families = list(families)

    def collect(self) -> list[Metric]:
        """The families."""
        return self._families


def _of_fleet(fleet: Mapping[str, Any]) -> Iterator[Metric]:
    if not fleet["available"]:
        return
    workers = GaugeMetricFamily("tandem_workers", "Rollout workers by state.", labels=("state",))
    for state in WorkerState:
        count = sum(worker["state"] == state.value for worker in fleet["workers"])
        workers.add_metric([state.value], count)
    yield workers
    yield _gauge("tandem_workers_target", "Target number of rollout workers.", fleet["target"])
    for key, about in (
        ("groups_waiting", "Groups that the learner has received and not trained on."),
        ("groups_out", "Groups that are leased to workers."),
    ):
        if isinstance(fleet.get(key), int | float):
            yield _gauge(f"tandem_{key}", about, fleet[key])
    for key, about in _WORKER_NUMBERS.items():
        family = GaugeMetricFamily(f"tandem_worker_{key}", about, labels=("worker",))
        for worker in fleet["workers"]:
            # A negative number of bytes means that the platform does not report it.
            if isinstance(worker.get(key), int | float) and not (
                key.endswith("_bytes") and worker[key] < 0
            ):
                family.add_metric([_clean(worker["name"])], worker[key])
        if family.samples:
            yield family


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, value=value)


def _counter(name: str, about: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, about, value=value)


def _prefixed(name: str) -> str:
    return "tandem_" + re.sub("_+", "_", _NOT_IN_A_NAME.sub("_", name)).strip("_")


def _clean(text: Any) -> str:
    """The text without what UTF-8 cannot encode."""
    return encodable(str(text))
