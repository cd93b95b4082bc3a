"""docs/metrics.md: what the command prints, and every name that Prometheus gets."""

import collections
import pathlib
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.made_run.made_run import make_run
from dashboard.catalog_report import document, main
from dashboard.prometheus import exposed
from diagnosis.catalog.catalog import METRICS, PHASE_ROWS
from tests.dashboard.served import served, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "metrics.md"
NAME = re.compile(r"`(tandem_\w+)(?:\{([^}]*)\})?`")


def listed() -> dict[str, set[str]]:
    """Labels by name, of every name for Prometheus."""
    return {name: set(filter(None, labels.split(", "))) for name, labels in pairs()}


def pairs() -> list[tuple[str, str]]:
    return NAME.findall("\n".join(line for line in document() if line.startswith("| ")))


def test_the_document_is_what_the_command_prints(capsys):
    main([])
    assert DOCUMENT.read_text() == capsys.readouterr().out, (
        "python -m dashboard.catalog_report > docs/metrics.md"
    )


def test_every_metric_and_phase_has_a_row_of_as_many_cells_as_its_table():
    rows = [line.strip("| ").split(" | ")[0] for line in document() if line.startswith("| `")]
    counts = collections.Counter(rows)
    assert all(counts[f"`{metric.name}`"] == 1 for metric in METRICS)
    assert all(counts[f"`{phase.name}`"] == 1 for phase in PHASE_ROWS)
    width = 0
    for line in "\n".join(document()).splitlines():
        if line.startswith("|---"):
            width = line.count("|")
        assert not line.startswith("| `") or line.count("|") == width, line


def test_no_two_rows_have_one_name_for_prometheus():
    twice = [
        name for name, count in collections.Counter(n for n, _ in pairs()).items() if count > 1
    ]
    assert twice == []


def test_every_name_and_label_that_a_run_exposes_is_listed(tmp_path):
    make_run(tmp_path, steps=12, workers=2)
    with served(tmp_path) as site:
        until(lambda: site.get("/api/run").json()["step"] == 12, "the log to be read")
        text = site.get("/metrics").text
    there = listed()
    found = [one for family in text_string_to_metric_families(text) for one in family.samples]
    assert len(found) > 100
    for sample in found:
        assert set(sample.labels) == there.get(sample.name), sample


def test_labels_are_the_words_that_the_name_has_in_braces():
    assert listed()["tandem_time_s"] == {"process", "phase"}
    shown, labels = exposed("time/rollout-0/decode_s")
    assert set(labels) == listed()[shown]
    assert listed()["tandem_phase_seconds_total"] == {"process", "phase"}
    assert listed()["tandem_train_kl"] == listed()["tandem_workers_target"] == set()


@pytest.mark.parametrize("argument, code", [("--help", 0), ("--frobnicate", 2), ("x", 2)])
def test_the_command_knows_no_arguments(capsys, argument, code):
    with pytest.raises(SystemExit) as end:
        main([argument])
    assert end.value.code == code and "| metric |" not in capsys.readouterr().out
