"""The text for Prometheus, read back by Prometheus' own parser, and the dashboard for Grafana."""

import dataclasses
import json
import math
import pathlib
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.made_run.made_run import make_run
from dashboard.app import DOCUMENT
from dashboard.prometheus import STATES, Exporter, exposed
from dashboard.runs.driver_client import fleet_json, no_fleet
from diagnosis.records.facts import StepFacts
from diagnosis.records.run_log import RunLog
from services.control.messages import FleetStatus, ScalingPolicy, WorkerState, WorkerStatus
from tests.dashboard.served import served, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "deploy" / "grafana" / "tandem.json"
RUN = {
    "run": 'a "run"\n',
    "run_id": "made-1",
    "state": "running",
    "step": 2,
    "steps_total": 9,
    "started": 5.0,
}


def facts(step: int, **changes) -> StepFacts:
    whole = {
        "step": step,
        "time": 100.0 + step,
        "wall_s": 2.0,
        "processes": {"learner": {"idle": 1.5, "optimizer": 0.5}, "rollout-0": {"decode": 2.0}},
        "metrics": {"train/loss": 0.5},
    }
    return StepFacts(**(whole | changes))


def samples(text: bytes) -> dict[tuple[str, tuple], float]:
    """Every sample by name and labels; fails where two have both alike."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} stands there twice"
            found[key] = sample.value
    return found


def value(found, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


@pytest.mark.parametrize(
    "name, shown, labels",
    [
        ("train/loss", "tandem_train_loss", {}),
        ("time/train/step_s", "tandem_time_train_step_s", {}),
        ("time/rollout-0/decode_s", "tandem_time_s", {"process": "rollout-0", "phase": "decode"}),
        ("mem/learner/host_bytes", "tandem_mem_host_bytes", {"process": "learner"}),
        ("reward/a.b:c/mean", "tandem_reward_mean", {"scorer": "a.b:c"}),
        ("offpolicy/staleness_2", "tandem_offpolicy_staleness", {"n": "2"}),
        ("my own/métrique", "tandem_my_own_m_trique", {}),
    ],
)
def test_a_metric_of_the_log_has_a_name_that_prometheus_takes(name, shown, labels):
    assert exposed(name) == (shown, labels)


def test_seconds_of_steps_add_up_by_process_and_phase():
    exporter = Exporter()
    exporter.add_step(facts(1))
    exporter.add_step(facts(2, metrics={"train/kl": math.inf, "train/loss": math.nan}))
    found = samples(exporter.text(RUN, no_fleet("")))
    assert value(found, "tandem_phase_seconds_total", process="learner", phase="idle") == 3.0
    assert value(found, "tandem_phase_seconds_total", process="rollout-0", phase="decode") == 4.0
    assert value(found, "tandem_wall_seconds_total") == 4.0
    assert value(found, "tandem_train_kl") == math.inf
    assert math.isnan(value(found, "tandem_train_loss"))
    assert value(found, "tandem_run_info", run='a "run"\n', run_id="made-1") == 1
    assert value(found, "tandem_run_state", state="running") == 1
    assert value(found, "tandem_run_state", state="lost") == 0


def test_states_of_a_run_are_those_of_the_api():
    assert DOCUMENT["components"]["schemas"]["Run"]["properties"]["state"]["enum"] == list(STATES)


def test_a_metric_that_is_not_measured_at_every_step_keeps_its_last_value():
    exporter = Exporter()
    exporter.add_step(facts(1, metrics={"eval/accuracy/strict": 0.25}))
    exporter.add_step(facts(2))
    assert value(samples(exporter.text(RUN, no_fleet(""))), "tandem_eval_accuracy_strict") == 0.25


def test_names_that_prometheus_cannot_tell_apart_keep_apart_by_a_label():
    exporter = Exporter()
    exporter.add_step(
        facts(1, metrics={"my/a_b": 1.0, "my/a/b": 2.0, "run/step": 3.0, "log/a\ud800": 4})
    )
    found = samples(exporter.text(RUN, no_fleet("")))
    assert value(found, "tandem_my_a_b", metric="my/a_b") == 1.0
    assert value(found, "tandem_my_a_b", metric="my/a/b") == 2.0
    assert value(found, "tandem_run_step") == 2.0, "that of the run itself"
    assert value(found, "tandem_log_run_step") == 3.0


def test_the_fleet_has_a_sample_for_each_worker_while_the_driver_answers():
    workers = (
        WorkerStatus(name="rollout-0", state=WorkerState.WORKING, tokens_per_s=12.5),
        WorkerStatus(name="rollout-1", state=WorkerState.STARTING),
    )
    fleet = FleetStatus(target=3, least=1, most=4, policy=ScalingPolicy.FIXED, workers=workers)
    found = samples(Exporter().text(RUN, fleet_json(fleet)))
    assert value(found, "tandem_workers", state="working") == 1
    assert value(found, "tandem_workers", state="gone") == 0
    assert value(found, "tandem_workers_target") == 3
    assert value(found, "tandem_worker_tokens_per_s", worker="rollout-0") == 12.5
    gone = samples(Exporter().text(RUN, no_fleet("gone")))
    assert not any(name.startswith("tandem_worker") for name, _ in gone)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, steps=12, workers=2, nonfinite=True, hostile=True)
    with served(folder) as site:
        until(lambda: site.get("/api/run").json()["step"] == 12, "the log to be read")
        response = site.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    last = {}
    for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        last |= json.loads(line)
    return samples(response.content), last


def test_every_metric_of_a_run_is_there_with_its_last_value(scraped):
    found, last = scraped
    for name, expected in last.items():
        if name in ("step", "time", "nonfinite"):
            continue
        shown, labels = exposed(name)
        assert value(found, shown, **labels) == pytest.approx(float(expected), nan_ok=True), name


def test_a_log_that_is_loaded_says_what_its_steps_say_one_by_one(tmp_path):
    make_run(tmp_path, steps=30, workers=1, workers_to=3, nonfinite=True)
    log, one_by_one, at_once = RunLog(tmp_path), Exporter(), Exporter()
    for step in log.refresh().new_steps:
        one_by_one.add_step(step)
    at_once.load(log)
    expected = samples(one_by_one.text(RUN, no_fleet("")))
    found = samples(at_once.text(RUN, no_fleet("")))
    assert {key: one for key, one in found.items() if one != 0} == pytest.approx(
        {key: one for key, one in expected.items() if one != 0}, nan_ok=True
    )


def queried() -> set[str]:
    """Names of metrics in the expressions of the dashboard for Grafana."""
    document = json.loads(GRAFANA.read_text())
    texts = [target["expr"] for panel in panels(document) for target in panel["targets"]]
    texts += [
        one["query"]["query"]
        for one in document["templating"]["list"]
        if "query" in one and isinstance(one["query"], dict)
    ]
    return set(re.findall(r"tandem_\w+", " ".join(texts)))


def panels(document) -> list[dict]:
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def test_grafana_asks_for_what_is_exposed(scraped):
    found, _ = scraped
    workers = (WorkerStatus(name="rollout-0", state=WorkerState.WORKING),)
    fleet = FleetStatus(target=1, least=1, most=4, policy=ScalingPolicy.FIXED, workers=workers)
    there = {name for name, _ in found}
    there |= {name for name, _ in samples(Exporter().text(RUN, fleet_json(fleet)))}
    asked = queried()
    assert len(asked) > 15 and asked <= there, asked - there


def test_a_panel_without_a_number_of_a_run_that_is_over_says_why(tmp_path):
    make_run(tmp_path, steps=12, workers=2)
    log, exporter = RunLog(tmp_path), Exporter()
    for step in log.refresh().new_steps:
        kept = {name: one for name, one in step.metrics.items() if not name.startswith("eval/")}
        exporter.add_step(dataclasses.replace(step, metrics=kept))
    there = {name for name, _ in samples(exporter.text(RUN, no_fleet("over")))}
    empty = []
    for panel in panels(json.loads(GRAFANA.read_text())):
        asked = re.findall(r"tandem_\w+", " ".join(one["expr"] for one in panel["targets"]))
        if not set(asked) & there:
            empty.append(panel["title"])
            assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]
    assert sorted(empty) == ["Accuracy", "Accuracy", "Workers", "Workers"]


def test_panels_of_grafana_do_not_overlap_and_say_what_they_show():
    document = json.loads(GRAFANA.read_text())
    taken = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    assert all(panel["description"] for panel in panels(document))
