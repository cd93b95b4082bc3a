"""Prints docs/metrics.md: every metric of a run and its name for Prometheus.

python -m dashboard.catalog_report > docs/metrics.md
"""

import argparse
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from dashboard.prometheus import Exporter, family_name
from dashboard.runs.driver_client import fleet_json
from diagnosis.catalog.catalog import METRICS, PHASE_ROWS
from diagnosis.records.facts import StepFacts
from services.control.messages import FleetStatus, ScalingPolicy, WorkerState, WorkerStatus

HEAD = """# Metrics

Generated from the catalog by `python -m dashboard.catalog_report > docs/metrics.md`.

`metrics.jsonl` has each metric below in the steps that measured it; the page, W&B and TensorBoard
use the same names. `/metrics` exports the latest value under the name in the last column; NaN and
infinity are exported unchanged. A word in braces is a placeholder, and a label for Prometheus:
`{scorer}` for the name of a reward function, `{source}` for that of one of several training
sources, `{set}` for that of one of several held-out sets, `{process}` for `learner` or a worker,
`{phase}` for a phase of the ledger, `{thread}` for a thread of a worker, `{n}` for a number. Names
that Prometheus cannot tell apart get a label `metric` with the whole name.
"""
LOG = """
## Metrics of the steps

| metric | title | unit | meaning | Prometheus |
|---|---|---|---|---|"""
OWN = """
## Metrics of the run itself, for Prometheus only

Metrics of workers are exported while the driver answers, and not after the end of the run.

| Prometheus | type | meaning |
|---|---|---|"""
PHASES = """
## Phases

Values of the label `phase`, and keys of each process in `ledger.jsonl`.

| phase | meaning |
|---|---|"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the document."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m dashboard.catalog_report",
        description="Prints docs/metrics.md: every metric of a run and its name for Prometheus.",
    )
    parser.parse_args(arguments)
    print("\n".join(document()))


def document() -> Iterator[str]:
    """Its lines."""
    yield HEAD + LOG
    for row in METRICS:
        shown = _code(_with_labels(family_name(row), row.placeholders))
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
    """The families of a run that has every one of them."""
    exporter = Exporter()
    processes = {"learner": {"idle": 1.0}}
    exporter.add_step(StepFacts(step=1, time=1.0, wall_s=1.0, processes=processes, metrics={}))
    worker = WorkerStatus(
        name="rollout-0",
        state=WorkerState.WORKING,
        device_bytes=1,  # only if the platform reports them
        device_peak_bytes=1,
    )
    fleet = FleetStatus(target=1, least=1, most=1, policy=ScalingPolicy.FIXED, workers=(worker,))
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
