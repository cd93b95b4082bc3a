"""Trackers of metrics: W&B with a real offline run, TensorBoard with its files."""

import contextlib
import http.server
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from driver.accounting.jsonl import read_lines
from driver.config.sections.log import WandbConfig
from driver.reports.wandb_tracker import KEY_VARIABLE, WandbTracker, clean_api_key
from tests.deadlines import HANG_S
from tests.driver.reports.test_metrics import open_log

pytestmark = pytest.mark.slow

KEY = "k" * 86


@pytest.mark.parametrize("dirty", [KEY + "\r\n", " " + KEY, "\t" + KEY + " \n", KEY, "short"])
def test_o03_key_is_stripped_and_its_length_is_not_checked(dirty):
    environ = {KEY_VARIABLE: dirty}
    assert clean_api_key(environ) == ""
    assert environ[KEY_VARIABLE] == dirty.strip()


@pytest.mark.parametrize("empty", ["", " \r\n"])
def test_o03_empty_key_has_a_clear_message(empty):
    environ = {KEY_VARIABLE: empty}
    assert clean_api_key(environ) == "WANDB_API_KEY is set but empty: put the key there or unset it"
    assert clean_api_key({}) == ""


def test_disabled_tracker_starts_no_thread(tmp_path):
    before = threading.active_count()
    log = open_log(tmp_path)
    assert threading.active_count() == before
    log.close()
    assert not (tmp_path / "wandb").exists()


@pytest.fixture
def wandb_environ(monkeypatch):
    """The process environment for a test of W&B, put back after it."""
    import os

    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return monkeypatch


def run_folders(folder):
    return sorted(path.name for path in (folder / "wandb").glob("*run-*"))


KILLED = """
import pathlib, sys, time
from driver.config.sections.log import WandbConfig
from driver.reports.metrics import MetricsLog, open_trackers
folder, offline = pathlib.Path(sys.argv[1]), WandbConfig(mode="offline")
log = MetricsLog(folder, open_trackers(folder, offline, run_id="first", config={}, warn=print))
for step in range(1, 13):
    log.log(step, {"loss": float(step)})
while log._trackers[0]._queue.qsize() or log._trackers[0].mode != "offline":
    time.sleep(0.05)
print("logged", flush=True)
time.sleep(60)
"""


def test_o02_a_run_that_was_killed_goes_on_under_its_id_and_loses_no_step(tmp_path, wandb_environ):
    """To step 12, checkpoint at 10, kill, resume."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "logged\n"
        child.kill()
    time.sleep(1.1)  # W&B names its folders by the second
    log = open_log(tmp_path, WandbConfig(mode="offline"), run_id="second")
    assert log.resume_at(10) == 2
    for step in (11, 12, 13):
        log.log(step, {"loss": 10.0 * step, "kl": float("nan")})
    log.close(60)

    metrics = read_lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, 14))
    aside = read_lines(tmp_path / "metrics.superseded.jsonl")
    assert [(record["step"], record["loss"]) for record in aside] == [(11, 11.0), (12, 12.0)]
    names = run_folders(tmp_path)
    assert len(names) == 2 and all(name.endswith("-first") for name in names)
    lines = [line for line in wandb_history(tmp_path) if "loss" in line]
    assert [line["step"] for line in lines][-3:] == ["11", "12", "13"], "its own axis takes them"
    assert [line["loss"] for line in lines][-3:] == ["110", "120", "130"]


@contextlib.contextmanager
def server_that_refuses():
    """Answers everything with 401, and yields its address and the bodies of what it was sent."""
    seen = []

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            seen.append(self.path)
            self.send_response(401)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def log_five_steps(folder, **arguments):
    """Logs through an online tracker; returns its warnings."""
    warnings = []
    log = open_log(
        folder, WandbConfig(mode="online"), warn=warnings.append, init_timeout_s=3, **arguments
    )
    for step in range(1, 6):
        log.log(step, {"loss": 1.0})
    log.close(HANG_S)
    assert [r["step"] for r in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    return warnings


def test_refused_key_warns_once_and_records_offline(tmp_path, wandb_environ, capfd):
    with server_that_refuses() as (address, seen):
        wandb_environ.setenv("WANDB_BASE_URL", address)
        wandb_environ.setenv(KEY_VARIABLE, f" {KEY}\r\n")
        warnings = log_five_steps(tmp_path)
    assert seen
    (warning,) = warnings
    assert "W&B start failed and records offline" in warning and "401" in warning
    assert any(name.startswith("offline-run-") for name in run_folders(tmp_path))
    written = warning + "".join(capfd.readouterr())
    written += "".join(p.read_text() for p in tmp_path.rglob("*") if p.suffix in (".log", ".jsonl"))
    assert KEY not in written


def test_unreachable_server_warns_once_and_records_offline(tmp_path, wandb_environ):
    wandb_environ.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb_environ.setenv(KEY_VARIABLE, KEY)
    warnings = log_five_steps(tmp_path)
    assert len(warnings) == 1 and "records offline" in warnings[0]
    assert any(name.startswith("offline-run-") for name in run_folders(tmp_path))


def test_empty_key_records_offline_without_asking_anyone(tmp_path, wandb_environ):
    wandb_environ.setenv(KEY_VARIABLE, " \n")
    warnings = log_five_steps(tmp_path)
    assert warnings == [
        "WANDB_API_KEY is set but empty: put the key there or unset it; W&B records offline"
    ]
    assert all(name.startswith("offline-run-") for name in run_folders(tmp_path))


class StuckTracker(WandbTracker):
    """A tracker whose start never comes back until the test lets it."""

    release: threading.Event

    def _start(self):
        self.release.wait(HANG_S)
        return None


def test_a_stuck_tracker_drops_and_counts_and_never_blocks(tmp_path):
    StuckTracker.release = threading.Event()
    warnings = []
    tracker = StuckTracker(
        WandbConfig(mode="offline"),
        folder=tmp_path,
        run_id="r1",
        config={},
        warn=warnings.append,
        init_timeout_s=1,
        environ={},
        queue_lines=2,
    )
    started = time.monotonic()
    for step in range(7):
        tracker.log(step, {"loss": 1.0})
    tracker.close(0.2)
    assert time.monotonic() - started < HANG_S
    assert tracker.dropped == 5
    assert warnings[0] == "W&B is slower than training: some of its lines are dropped"
    assert "W&B did not finish within 0.2 s" in warnings[1]
    StuckTracker.release.set()


def wandb_records(path):
    """The records of a .wandb file, which is a log of LevelDB: 32 KiB blocks of fragments."""
    data, at, whole = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last fragment
            yield whole
            whole = b""


def wandb_history(folder):
    """What an offline run recorded, line by line, read from W&B's own file."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, wandb_records(path)):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append(
                    {"/".join([i.key, *i.nested_key]).strip("/"): i.value_json for i in items}
                )
    return found


def a_sample(number, **changes):
    return {
        "prompt_id": number,
        "why": "first",
        "question": "1 + 1?",
        "completion": "#### 2 \ud800",
        "rewards": {"gsm8k_answer": 1.0},
        "total_reward": 1.0,
        "reward_error": "",
        "tokens": [["#### 2", -0.1]],
        **changes,
    }


def test_o01_wandb_gets_the_same_names_and_values_that_are_not_finite_as_themselves(
    tmp_path, wandb_environ
):
    log = open_log(tmp_path, WandbConfig(mode="offline"))
    log.log(1, {"train/kl": float("nan"), "train/loss": float("-inf"), "reward/total/mean": 0.5})
    log.close(60)
    (line,) = [line for line in wandb_history(tmp_path) if line.get("step") == "1"]
    assert (line["train/kl"], line["train/loss"]) == ("NaN", "-Infinity")
    assert line["reward/total/mean"] == "0.5"


def test_wandb_gets_a_table_of_samples_in_batches_and_the_rest_at_the_end(tmp_path, wandb_environ):
    log = open_log(tmp_path, WandbConfig(mode="offline"))
    for step in range(1, 7):
        nan = float("nan")
        log.log_samples(step, [a_sample(4 * step + i, total_reward=nan) for i in range(4)])
    log.close(60)
    lines = [line for line in wandb_history(tmp_path) if "samples/_type" in line]
    assert [(line["step"], line["samples/nrows"]) for line in lines] == [("5", "20"), ("6", "24")]
    assert {line["samples/_type"] for line in lines} == {'"incremental-table-file"'}
    rows = []
    for path in sorted((tmp_path / "wandb").rglob("*.table.json")):
        content = json.loads(path.read_text())
        rows += [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    assert sorted(row["prompt_id"] for row in rows) == list(range(4, 28))
    assert {row["completion"] for row in rows} == {"#### 2 \\ud800"}
    assert {row["step"] for row in rows} == {1, 2, 3, 4, 5, 6}
    assert len(read_lines(tmp_path / "samples.jsonl")) == 24


def test_a_resumed_run_adds_to_its_table_and_a_long_text_is_cut(
    tmp_path, wandb_environ, monkeypatch
):
    monkeypatch.setattr("driver.reports.wandb_tracker.MOST_ROWS", 20)
    for run_id in ("first", "second"):
        log = open_log(tmp_path, WandbConfig(mode="offline"), run_id=run_id)
        for step in range(1, 11):
            log.log_samples(step, [a_sample(i, completion="x" * 5000) for i in range(4)])
        log.close(60)
        time.sleep(1.1)  # W&B names its folders by the second
    names = run_folders(tmp_path)
    assert len(names) == 2 and all(name.endswith("-first") for name in names)
    lines = [line for line in wandb_history(tmp_path) if "samples/_type" in line]
    assert [line["samples/nrows"] for line in lines] == ["20"] * 4, "a full table is followed"
    content = json.loads(next((tmp_path / "wandb").rglob("*.table.json")).read_text())
    cell = content["data"][0][content["columns"].index("completion")]
    assert cell == "x" * 2000 + "... (5000 characters)"


def tensorboard_events(folder):
    """Steps and scalars of every event file, oldest file first, and the purge steps."""
    from tensorboardX.proto.event_pb2 import Event

    scalars, purged = [], []
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda p: p.suffix):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.HasField("session_log"):
                purged.append(event.step)
            scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return scalars, purged


def test_tensorboard_gets_the_same_names_and_values_that_are_not_finite_as_themselves(tmp_path):
    log = open_log(tmp_path, tensorboard=True)
    log.log(1, {"train/kl": float("nan"), "train/loss": float("inf"), "reward/total/mean": 0.5})
    log.log_samples(1, [a_sample(0)])
    log.close(10)
    scalars, purged = tensorboard_events(tmp_path)
    assert [(step, tag) for step, tag, _ in scalars] == [
        (1, "train/kl"),
        (1, "train/loss"),
        (1, "reward/total/mean"),
    ]
    values = [value for _, _, value in scalars]
    assert np.isnan(values[0]) and values[1:] == [float("inf"), 0.5]
    assert purged == []


def test_tensorboard_forgets_the_steps_after_the_checkpoint_of_a_resume(tmp_path):
    log = open_log(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        log.log(step, {"loss": float(step)})
    log.close(10)
    log = open_log(tmp_path, tensorboard=True)
    log.resume_at(2)
    log.log(3, {"loss": 30.0})
    log.close(10)
    scalars, purged = tensorboard_events(tmp_path)
    assert purged == [3]
    assert scalars == [(1, "loss", 1.0), (2, "loss", 2.0), (3, "loss", 3.0), (3, "loss", 30.0)]


def test_tensorboard_that_cannot_write_warns_once_and_the_log_goes_on(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    warnings = []
    log = open_log(tmp_path, tensorboard=True, warn=warnings.append)
    for step in (1, 2):
        log.log(step, {"loss": 1.0})
    log.close(10)
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2
    assert "TensorBoard start failed and is left out: FileExistsError" in warnings[0]


@pytest.mark.parametrize(
    "library, arguments, message",
    [
        ("tensorboardX", {"tensorboard": True}, "TensorBoard is not installed: pip install"),
        ("wandb", {"wandb": WandbConfig(mode="offline")}, "W&B is not installed: pip install"),
    ],
)
def test_a_library_that_is_missing_is_said_once(tmp_path, monkeypatch, library, arguments, message):
    for name in [n for n in sys.modules if n.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    warnings = []
    log = open_log(tmp_path, warn=warnings.append, **arguments)
    log.log(1, {"loss": 1.0})
    log.close(10)
    assert len([w for w in warnings if w.startswith(message)]) == 1
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 1
