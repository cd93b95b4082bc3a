"""The dashboard of a whole run, and where a Ray cluster names it: real processes, real sockets."""

import json
import os
import pathlib
import re
import secrets
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from dashboard import auth
from deploy import run_local
from tests.deadlines import HANG_S
from tests.driver.service_run import ONE_WORKER, ROOT, Service, write_model_and_data

pytestmark = [pytest.mark.slow, pytest.mark.service]

URL = "http://127.0.0.1:8470"


@pytest.fixture
def service(tmp_path, tmp_path_factory):
    """A run that is held after two steps, with a dashboard on a free port."""
    model = write_model_and_data(tmp_path_factory.mktemp("model"))
    run = Service(tmp_path, model, *ONE_WORKER, "--set", "log.dashboard.port=0", hold_after=2)
    yield run
    run.kill()


def test_a_run_serves_its_dashboard_to_its_end_and_writes_its_tokens_nowhere(service):
    service.wait_for(lambda: "dashboard: http://" in service.text, "its dashboard")
    url, tokens = auth.read_access(service.out / "dashboard")
    assert f"dashboard: {url} (link with its token: python -m dashboard" in service.text
    headers = {"authorization": f"Bearer {tokens.view}"}
    received: list[dict] = []

    def watch() -> None:
        with (
            httpx.Client(base_url=url, headers=headers, timeout=HANG_S, trust_env=False) as viewer,
            viewer.stream("GET", "/api/stream") as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: "):
                    received.append(json.loads(line.removeprefix("data: ")))

    service.wait_for(lambda: answers(url), "an answer")
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    service.wait_for(lambda: (service.out / "control" / "key.pem").exists(), "its control service")
    with httpx.Client(base_url=url, headers=headers, timeout=HANG_S, trust_env=False) as viewer:
        service.wait_for(lambda: len(viewer.get("/api/fleet").json()["workers"]) == 1, "a worker")
        service.wait_for(lambda: viewer.get("/api/run").json()["step"] >= 2, "two steps")
        step = viewer.get("/api/step/2").json()
    (line,) = [line for line in service.lines("ledger") if line["step"] == 2]
    assert step["processes"] == line["processes"] and step["groups"] == line["groups"]
    service.wait_for(lambda: any("wall_s" in one for one in received), "the stream")
    service.release()
    assert service.wait() == 0, service.text
    thread.join(HANG_S)
    assert not thread.is_alive(), "the stream ended with the run"
    states = [one["state"] for one in received if "steps_total" in one]
    assert states[0] == "running" and states[-1] == "finished"
    assert [one["step"] for one in received if "wall_s" in one][-1] == service.status["step"]
    assert not (service.out / "dashboard").exists()
    assert (service.out / "dashboard.log").read_text() == ""
    left = [p for p in psutil.process_iter() if str(service.out) in " ".join(command_of(p))]
    assert not psutil.wait_procs(left, timeout=HANG_S)[1], "the watch of its end ends after it"
    for path in (service.log, *(one for one in service.out.rglob("*") if one.is_file())):
        raw = path.read_bytes()
        assert tokens.view.encode() not in raw and tokens.control.encode() not in raw, path


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


SCRIPT = f"""
import os, pathlib, sys, time
from driver.config.sections.log import DashboardConfig
from driver.fleet.cluster import connect, stop_notice
from driver.reports.dashboard_process import open_dashboard
from driver.reports.end_watch import start_end_watch
from driver.reports.status import StatusFile
from driver.signals import StopSignal
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
StatusFile(folder, run="r", run_id="r")
start_end_watch(folder)
with open_dashboard(DashboardConfig(port=0), folder) as dashboard:
    dashboard.start(lambda text: print(text, flush=True))
    connect("test", StopSignal(), {{"tandem_dashboard": "{URL}"}})
    print(stop_notice(os.environ), flush=True)
    time.sleep(600)  # as one that writes a checkpoint after SIGTERM
"""


@pytest.fixture
def head(tmp_path, monkeypatch):
    """A Ray head of our own: its job address, and the environment of a process that joins it."""
    folder = pathlib.Path(f"/tmp/tandem-test-{secrets.token_hex(3)}")
    folder.mkdir()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    environment = {
        **os.environ,
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "no_proxy": "127.0.0.1,localhost",
    }
    log_path = tmp_path / "head.log"
    with log_path.open("w") as log:
        process, address = run_local.start_head(environment, str(folder), log)
        try:
            run_local.wait_for_head(process, address, log_path)
            yield address, environment, log_path
        finally:
            run_local.end_group(process, 3)
            subprocess.run(["rm", "-rf", str(folder)], check=True)


def gcs_of(log_path: pathlib.Path) -> str:
    """Where a driver joins, once the head's log says so."""
    found = re.search(r"ray start --address='?([\d.]+:\d+)", log_path.read_text())
    return found[1] if found else ""


def test_a_submitted_job_has_its_link_in_the_runs_folder_and_a_joined_one_in_its_metadata(
    head, tmp_path
):
    address, environment, log_path = head
    script = tmp_path / "driver_script.py"
    script.write_text(SCRIPT)
    # Ray reads its token once a process, and other tests have joined other clusters in this one.
    looking = f"import {__name__} as test; test.look_at_jobs(*__import__('sys').argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", looking, address, str(log_path), str(script)],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=4 * HANG_S,
    )
    assert done.returncode == 0, done.stderr


def look_at_jobs(address: str, log: str, script: str) -> None:
    """Submits the script and finds the link of its dashboard; joins with the script as well and
    finds the URL in the list of jobs."""
    from ray.job_submission import JobSubmissionClient

    jobs = wait_for(lambda: JobSubmissionClient(address), "the job server")
    folder = pathlib.Path(script).with_name("submitted")
    submitted = wait_for(
        lambda: jobs.submit_job(
            entrypoint=f"{sys.executable} {script} {folder}",
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
            metadata={"owner": "me"},
        ),
        "an agent that takes jobs",
    )
    said = wait_for(
        lambda: re.search(r"dashboard: (http://\S+) \(", jobs.get_job_logs(submitted)),
        "the dashboard's address in the job's output",
    )
    shown = subprocess.run(
        [sys.executable, "-m", "dashboard", "--run", str(folder), "--link"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    _, tokens = auth.read_access(folder / auth.FOLDER)
    assert shown.stdout.splitlines()[0] == auth.link(said[1], tokens)
    assert jobs.get_job_info(submitted).metadata == {"owner": "me"}
    gcs = wait_for(lambda: gcs_of(pathlib.Path(log)), "the head's address")
    joined = subprocess.Popen(
        [sys.executable, script, str(folder.with_name("joined"))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": gcs},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(
            lambda: any(
                job.submission_id is None and (job.metadata or {}).get("tandem_dashboard") == URL
                for job in jobs.list_jobs()
            ),
            "the metadata of a driver that joined",
        )
    finally:
        joined.kill()
        joined.wait()
    notice = "`ray job stop` kills this job after 3 s"
    wait_for(lambda: notice in jobs.get_job_logs(submitted), "the notice of a short stop")
    jobs.stop_job(submitted)
    status = folder / "status.json"
    ended = wait_for(
        lambda: (found := json.loads(status.read_text()))["state"] != "running" and found,
        "the end of a job that was killed with all its descendants",
    )
    assert (ended["state"], ended["exit_code"]) == ("failed", 137)


def wait_for(ask, what: str):
    """What `ask` returns once it is true."""
    deadline, error = time.monotonic() + HANG_S, None
    while time.monotonic() < deadline:
        try:
            if found := ask():
                return found
        except (RuntimeError, ConnectionError) as not_yet:
            error = not_yet
        time.sleep(0.5)
    raise AssertionError(f"waited {HANG_S} s for {what}: {error}")
