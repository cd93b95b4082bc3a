"""Every metric of a run and its name for Prometheus, as docs/metrics.md has them.

python -m dashboard.catalog_report > docs/metrics.md
"""

from collections.abc import Iterator

from prometheus_client.core import Metric

from dashboard.prometheus import Exporter, family_name
from dashboard.runs.driver_client import fleet_json
from diagnosis.catalog.catalog import METRICS, PHASE_ROWS
from diagnosis.records.facts import StepFacts
from services.control.messages import Fleet, ScalingPolicy, WorkerState, WorkerStatus

HEAD = """# Metrics

Made from the catalog by `python -m dashboard.catalog_report > docs/metrics.md`.

Every number below stands in `metrics.jsonl` under its name, where a step measured it; the page,
W&B and TensorBoard use the same names. `/metrics` gives the value that was measured last, under
the name in the last column; NaN and infinity stand there as they are. A word in braces stands for
what differs between runs, and is a label for Prometheus: `{scorer}` for the name of a reward
function, `{process}` for `learner` or a worker, `{phase}` for a phase of the ledger, `{thread}` for
a thread of a worker, `{n}` for a number. Two names that Prometheus cannot tell apart get a label
`metric` with the whole name.
"""
LOG = """
## Of the steps

| metric | title | unit | meaning | Prometheus |
|---|---|---|---|---|"""
OWN = """
## Of the run itself, for Prometheus alone

Those of workers are there while the driver answers: of a run that is over they are absent.

| Prometheus | type | meaning |
|---|---|---|"""
PHASES = """
## Phases

Values of the label `phase`, and keys of a process in `ledger.jsonl`.

| phase | meaning |
|---|---|"""


def main() -> None:
    """Prints the document."""
    print("\n".join(document()))


def document() -> Iterator[str]:
    """Its lines."""
    yield HEAD + LOG
    for row in METRICS:
        shown = _code(_with_labels(family_name(row), row.words))
        yield _line(_code(row.name), row.title, row.unit, row.description, shown)
    yield OWN
    for family in _own_families():
        sample = family.samples[0]
        shown = _code(_with_labels(sample.name, tuple(sample.labels)))
        yield _line(shown, family.type, family.documentation)
    yield PHASES
    for phase in PHASE_ROWS:
        yield _line(_code(phase.name), phase.description)


def _own_families() -> list[Metric]:
    """Of a run in which everything is there."""
    exporter = Exporter()
    processes = {"learner": {"idle": 1.0}}
    exporter.add(StepFacts(step=1, time=1.0, wall_s=1.0, processes=processes, metrics={}))
    worker = WorkerStatus(
        name="rollout-0",
        state=WorkerState.WORKING,
        device_bytes=1,  # where the platform tells them
        device_peak_bytes=1,
    )
    fleet = Fleet(target=1, least=1, most=1, policy=ScalingPolicy.FIXED, workers=(worker,))
    run = {"run": "", "run_id": "", "state": "running", "step": 1, "steps_total": 1, "started": 0.0}
    return exporter.families(run, fleet_json(fleet), viewers=0, dropped=0)


def _with_labels(name: str, labels: tuple[str, ...]) -> str:
    return f"{name}{{{', '.join(labels)}}}" if labels else name


def _code(text: str) -> str:
    return f"`{text}`"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    main()
