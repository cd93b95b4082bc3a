"""The HTTP side over real sockets: documents, refusals, headers, and what a running run does."""

import json
import math

import pytest

from benchmarks.made_run.made_run import MadeRun, make_run
from benchmarks.made_run.made_steps import RunPlan
from dashboard.guard import SECURITY_HEADERS
from dashboard.runs import driver_client as fleet
from dashboard.runs.driver_client import DriverClient
from services.control.access import write_access
from services.control.messages import (
    Accepted,
    FleetStatus,
    NoSuchWorker,
    NotNow,
    OutOfBounds,
    ScalingPolicy,
    WorkerState,
    WorkerStatus,
)
from services.control.service import control_service
from services.wire.server import Server
from tests.dashboard.served import events, served, strict, until

pytestmark = pytest.mark.slow

GETS = (
    *("/healthz", "/openapi.json", "/api/run", "/api/catalog", "/api/history", "/api/step/5"),
    *("/api/timeline?first=3&last=5", "/api/trace?first=3&last=5", "/api/samples?limit=7"),
    *("/api/samples/t1", "/api/samples/t1/same", "/api/judgement", "/api/fleet"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, steps=40, workers=2, nonfinite=True, hostile=True)
    return folder


@pytest.fixture(scope="module")
def site(run):
    with served(run) as site:
        until(lambda: site.get("/api/run").json()["step"] == 40, "the log to be read")
        yield site


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize("path", GETS)
def test_every_document_is_strict_json_with_security_headers(site, path):
    response = site.get(path)
    assert response.status_code == 200, response.text
    strict(response.content)
    for name, value in SECURITY_HEADERS.items():
        assert response.headers[name] == value
    assert response.headers["cache-control"] == "no-store"


def test_a_step_says_what_its_lines_in_the_logs_say(site, run):
    found = site.get("/api/step/7").json()
    ledger = next(line for line in lines(run, "ledger.jsonl") if line["step"] == 7)
    metrics = next(line for line in lines(run, "metrics.jsonl") if line["step"] == 7)
    assert found["processes"] == ledger["processes"] and found["groups"] == ledger["groups"]
    assert found["metrics"]["train/loss"] == metrics["train/loss"]
    assert sum(found["path"].values()) == pytest.approx(found["wall_s"])


def test_a_number_that_is_not_finite_arrives_as_a_text_wherever_it_stands(site, run):
    line = next(line for line in lines(run, "metrics.jsonl") if line.get("nonfinite"))
    name, step = line["nonfinite"][0], line["step"]
    assert site.get(f"/api/step/{step}").json()["metrics"][name] == line[name]
    history = site.get("/api/history", names=name).json()
    assert step in history["nonfinite"][name]
    assert line[name] in history["metrics"][name]


@pytest.mark.parametrize(
    "path, status, part",
    [
        ("/api/step/41", 404, "the log has steps up to 40"),
        ("/api/step/x", 404, "'x' is not a step"),
        ("/api/samples/t99999", 404, "give an id that /api/samples lists"),
        ("/api/samples/../../etc/passwd", 404, "there is no"),
        ("/api/history?first=x", 422, "first='x' must be a whole number"),
        ("/api/history?first=9&last=3", 422, "first"),
        ("/api/history?points=3", 422, "points='3' must be a whole number between 10 and 5000"),
        ("/api/history?frist=3", 422, "'frist' is not a parameter here: give first, last"),
        ("/api/timeline?last_s=nan", 422, "last_s='nan' must be a number"),
        ("/api/samples?kind=both", 422, "kind='both' must be train or eval"),
        ("/api/samples?reward_min=2&reward_max=1", 422, "swap them"),
        ("/api/samples?limit=0", 422, "limit"),
        ("/api/compare", 404, "--compare A B"),
        ("/api/nothing", 404, "there is no /api/nothing"),
        ("/static/../app.py", 404, "there is no"),
        ("/static/%2e%2e/app.py", 404, "there is no"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(site, path, status, part):
    response = site.get(path)
    assert response.status_code == status, response.text
    assert part in response.json()["error"]


def test_the_page_and_its_files_have_their_types_and_are_asked_for_again(site):
    for path, kind in (("/", "text/html"), ("/static/app.js", "text/javascript")):
        response = site.get(path)
        assert response.headers["content-type"].startswith(kind)
        assert response.headers["cache-control"] == "no-cache"
        with site.client() as client:
            again = client.get(path, headers={"if-none-match": response.headers["etag"]})
        assert again.status_code == (304 if path != "/" else again.status_code)


def test_a_long_answer_is_compressed_and_the_stream_is_not(site):
    assert site.get("/api/history").headers["content-encoding"] == "gzip"
    with site.client() as client, client.stream("GET", "/api/stream") as response:
        assert "content-encoding" not in response.headers
        assert next(events(response)).kind == "run"


def test_a_hostile_text_travels_as_it_is_and_is_never_a_page(site):
    found = site.get("/api/samples", q="<script>", limit=5)
    assert found.json()["total"] > 0 and "<script>" in found.text
    assert found.headers["content-type"] == "application/json"
    assert found.headers["x-content-type-options"] == "nosniff"


def test_a_change_of_a_run_that_is_over_is_refused(site):
    with site.client(site.tokens.control) as client:
        answer = client.post("/api/fleet", json={"target": 2})
    assert answer.status_code == 409 and "the run has ended" in answer.json()["error"]


@pytest.fixture
def running(tmp_path):
    run = MadeRun(tmp_path / "run", RunPlan(steps=200, workers=2))
    for _ in range(4):
        run.write_step()
    run.progress()
    return run


def test_steps_and_the_end_of_a_run_reach_those_who_watch(running):
    with (
        served(running.folder) as site,
        site.client() as client,
        client.stream("GET", "/api/stream") as response,
    ):
        told = events(response)
        first = [next(told) for _ in range(3)]
        assert [event.kind for event in first] == ["run", "fleet", "judgement"]
        assert first[0].data["state"] == "running"
        running.write_step()
        step = next(event for event in told if event.kind == "step")
        assert step.data["step"] == 4
        assert step.data["groups"] == {
            state: len(ids) for state, ids in site.get("/api/step/4").json()["groups"].items()
        }
        judgement = next(event for event in told if event.kind == "judgement")
        assert judgement.data["step"] == 4
        for _ in range(60):
            running.write_step()
        assert next(event for event in told if event.kind == "reload").data == {}
        running.end("failed")
        ids = []
        for event in told:
            ids.append(event.id)
            if event.kind == "run" and event.data["state"] == "failed":
                break
        assert ids == sorted(set(ids))
        assert event.data["live"] is False


def test_a_run_that_stops_writing_raises_an_alert(running):
    def alerts(judgement) -> list[str]:
        return [alert["id"] for alert in judgement["alerts"]]

    clock = [lines(running.folder, "metrics.jsonl")[-1]["time"]]
    with (
        served(running.folder, now=lambda: clock[0]) as site,
        site.client() as client,
        client.stream("GET", "/api/stream") as response,
    ):
        told = (event.data for event in events(response) if event.kind == "judgement")
        assert "no_step" not in alerts(next(told))
        clock[0] += 3600
        until(lambda: "no_step" in alerts(client.get("/api/judgement").json()), "the alert")
        assert any("no_step" in alerts(judgement) for judgement in told)


def test_a_run_whose_driver_is_gone_is_lost(running):
    gone = []
    with (
        served(running.folder, driver_is_gone=lambda pid: bool(gone)) as site,
        site.client() as client,
        client.stream("GET", "/api/stream") as response,
    ):
        told = events(response)
        assert next(told).data["state"] == "running"
        gone.append(True)
        lost = next(e for e in told if e.kind == "run" and e.data["state"] == "lost")
        assert lost.data["live"] is False and lost.data["can_control"] is False


def test_a_log_that_was_rewound_is_published_as_a_reload(running):
    with (
        served(running.folder) as site,
        site.client() as client,
        client.stream("GET", "/api/stream") as response,
    ):
        told = events(response)
        next(told)
        for name in ("ledger.jsonl", "metrics.jsonl"):
            path = running.folder / name
            kept = path.read_text("utf-8").splitlines(keepends=True)[:2]
            path.with_suffix(".new").write_text("".join(kept), "utf-8")
            path.with_suffix(".new").replace(path)
        until(lambda: site.get("/api/run").json()["step"] == 1, "the log to be read anew")
        assert next(event for event in told if event.kind == "reload")


class Driver:
    """Answers as a driver does that has two workers."""

    def __init__(self):
        self.asked = 0
        self.target = 2

    def fleet(self) -> FleetStatus:
        self.asked += 1
        state = WorkerState.WORKING
        workers = tuple(WorkerStatus(name=f"rollout-{i}", state=state) for i in range(2))
        return FleetStatus(
            target=self.target, least=1, most=4, policy=ScalingPolicy.FIXED, workers=workers
        )

    def scale(self, target: int, timeout_s: float) -> Accepted:
        if target > 4:
            raise OutOfBounds(f"{target} rollout workers are not between 1 and 4")
        if target == 3:
            raise NotNow("the run is ending")
        if target == 1:
            raise TimeoutError("the driver was busy")
        self.target = target
        return Accepted(target=target, current=2)

    def drain(self, name: str, timeout_s: float) -> Accepted:
        if name != "rollout-1":
            raise NoSuchWorker(f"there is no rollout worker {name!r}")
        self.target -= 1
        return Accepted(target=self.target, current=2)


@pytest.fixture
def driver(running, authority):
    driver = Driver()
    with Server(authority.issue("driver"), [control_service(driver)]) as server:
        write_access(running.folder, server.address, authority.issue("control"))
        yield driver


def test_the_fleet_can_be_seen_and_changed_with_the_control_token(running, driver):
    with served(running.folder) as site:
        fleet = site.get("/api/fleet").json()
        assert (fleet["available"], fleet["target"], fleet["min"], fleet["max"]) == (True, 2, 1, 4)
        assert [worker["state"] for worker in fleet["workers"]] == ["working", "working"]
        assert site.get("/api/run").json()["can_control"] is True
        with site.client(site.tokens.control) as client:
            for path, body, status, part in (
                ("/api/fleet", {"target": 4}, 200, ""),
                ("/api/fleet", {"target": 5}, 422, "not between 1 and 4"),
                ("/api/fleet", {"target": 3}, 409, "the run is ending"),
                ("/api/fleet", {"target": 1}, 504, "the driver was busy"),
                ("/api/fleet", {"target": True}, 422, "a whole number"),
                ("/api/fleet", {"target": -1}, 422, "not a number of workers"),
                ("/api/fleet", {"workers": 4}, 422, "'target' alone"),
                ("/api/fleet", [4], 422, "'target' alone"),
                ("/api/fleet/drain", {"name": "rollout-1"}, 200, ""),
                ("/api/fleet/drain", {"name": "rollout-9"}, 404, "no rollout worker 'rollout-9'"),
                ("/api/fleet/drain", {"name": "a\0"}, 422, "is not a worker"),
            ):
                answer = client.post(path, json=body)
                assert answer.status_code == status, (body, answer.text)
                assert part in answer.json().get("error", "")
            assert client.post("/api/fleet", content=b"{" * 5000).status_code == 422
            assert client.post("/api/fleet", content=b'{"target": NaN}').status_code == 422
            assert client.post("/api/fleet", content=b"[" * 4000).status_code == 422
            lone = client.post("/api/fleet/drain", content=b'{"name": "\\ud800"}')
            assert lone.status_code == 422, "gRPC cannot carry it"
        assert site.get("/api/fleet").json()["target"] == 3


def test_the_driver_is_asked_for_its_fleet_only_while_there_are_viewers(running, driver):
    with served(running.folder) as site:
        running.write_step()
        until(lambda: site.follower.log.last_step == 4, "the new step")
        assert driver.asked == 0
        with site.client() as client, client.stream("GET", "/api/stream") as response:
            told = events(response)
            next(told)
            until(lambda: driver.asked >= 3, "the driver to be asked again and again")


def test_a_driver_that_cannot_be_reached_is_no_error_of_the_page(running, authority, monkeypatch):
    monkeypatch.setattr(fleet, "FLEET_S", 0.5)
    monkeypatch.setattr(fleet, "CHANGE_S", 0.5)
    write_access(running.folder, "127.0.0.1:1", authority.issue("control"))
    with served(running.folder) as site:
        found = site.get("/api/fleet").json()
        assert found["available"] is False and "127.0.0.1:1" in found["why"]
        with site.client(site.tokens.control) as client:
            answer = client.post("/api/fleet", json={"target": 2})
            assert answer.status_code in (503, 504)


def test_a_connection_is_opened_anew_after_a_driver_was_replaced(running, authority):
    link, driver = DriverClient(running.folder), Driver()
    assert "is missing" in link.fleet()["why"]
    for _ in range(2):
        with Server(authority.issue("driver"), [control_service(driver)]) as server:
            write_access(running.folder, server.address, authority.issue("control"))
            until(lambda: link.fleet()["available"], "the driver")
    link.close()


def test_infinity_of_a_judgement_is_a_text(site):
    text = site.get("/api/judgement").text
    assert not any(word in text for word in (":NaN", ":Infinity", ":-Infinity"))
    assert math.isfinite(site.get("/api/judgement").json()["time"])


def test_only_get_and_the_two_posts_are_there(site):
    with site.client(site.tokens.control) as client:
        for method, path in (("DELETE", "/api/run"), ("PUT", "/api/fleet"), ("POST", "/api/run")):
            answer = client.request(method, path)
            assert answer.status_code == 405 and "/openapi.json" in answer.json()["error"]
        assert client.head("/api/run").status_code == client.head("/api/stream").status_code == 200
