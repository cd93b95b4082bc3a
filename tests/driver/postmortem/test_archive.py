"""The archive of a run that ended badly: what is in it, what never is, and its bounds."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tarfile
import time

import pytest

from driver.errors import RunError
from driver.postmortem import archive, evidence
from driver.postmortem.archive import Bundle, collect, main
from driver.postmortem.evidence import FILE_BYTES, Found, Sources
from driver.reports.redact import GUARD_BYTES, Redactor
from driver.reports.status import ExitCode, StatusFile
from driver.supervisor import LearnerLost, NoAnswer
from services.process.run_processes import read_processes
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow

TOKEN, KEY = "5f" * 32, "wandb-key-0123456789"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\nc2VjcmV0\n-----END PRIVATE KEY-----\n"

ACTOR = """
import pathlib, sys, time
from services.process.stacks import register
register(pathlib.Path(sys.argv[1]), sys.argv[2])
print("the last words of", sys.argv[2], *sys.argv[3:], flush=True)
pathlib.Path(sys.argv[1], f"{sys.argv[2]}.ready").touch()
def waits_for_groups():
    time.sleep(600)
waits_for_groups()
"""
DRIVER = """
import os, pathlib, signal, sys
from driver.reports.status import StatusFile
from services.process.stacks import register
folder = pathlib.Path(sys.argv[1])
register(folder, "driver")
StatusFile(folder, run="demo", run_id="demo-1").progress(7, last_checkpoint=5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run_folder(tmp_path):
    """The folder of a run that closed three steps."""
    folder = tmp_path / "run"
    StatusFile(folder, run="demo", run_id="demo-1").progress(3, last_checkpoint=2)
    for step in range(1, 400):
        for log in ("metrics", "ledger"):
            with (folder / f"{log}.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "train/loss": 0.5}) + "\n")
    (folder / "metrics.jsonl").open("a").write('{"step": 400, "train/lo')
    (folder / "spool").mkdir()
    (folder / "spool" / "step-00000000.bin").write_bytes(b"g" * 123)
    return folder


@pytest.fixture
def start(run_folder, tmp_path):
    """Starts an actor of the run with a log of its own, as Ray gives it."""
    started = []

    def run(name: str, *words: str) -> subprocess.Popen:
        logs = tmp_path / "session_1" / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "raylet.out").touch()
        with (logs / f"worker-abc-{name}.out").open("w") as log:
            command = [sys.executable, "-c", ACTOR, str(run_folder), name, *words]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
        deadline = time.monotonic() + HANG_S
        while not (run_folder / f"{name}.ready").exists():
            assert time.monotonic() < deadline and started[-1].poll() is None
            time.sleep(0.02)
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def unpacked(path: pathlib.Path | None) -> dict[str, bytes]:
    """The files of an archive by their names without the folder that all lie in."""
    assert path
    with tarfile.open(path) as archive:
        files = {m.name.partition("/")[2]: archive.extractfile(m).read() for m in archive}  # pyright: ignore
        assert len({m.name.partition("/")[0] for m in archive}) == 1
    return files


def test_an_archive_explains_a_hang_and_holds_what_a_person_asks_for(run_folder, start):
    silent, other = start("learner"), start("rollout-0")
    silent.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, silent.pid, os.WSTOPPED | os.WNOWAIT)
    said = []
    try:
        raise NoAnswer("learner did not answer 'update' within 60 s", details="trace of another")
    except NoAnswer as error:
        sources = Sources(
            config="run:\n  name: demo\n",
            tables={"leases": {"rollout-0": ["g00000007"]}, "buffer": {"waiting": 3}},
            worker_errors=["rollout-1: its process ended"],
            overcome_errors=["rollout-0: timed out"],
        )
        path = collect(run_folder, error, sources, said.append)
    files = unpacked(path)
    why = files["PROBABLE_CAUSE.md"].decode()
    assert said == [
        "probable cause: no answer from learner before its deadline: its process is stopped",
        f"post-mortem: {path}",
    ]
    assert why.startswith("# no answer from learner") and "state T" in why
    assert "exit code: 1" in why and "step 3, last checkpoint 2" in why
    assert b"trace of another" in files["error.txt"] and b"NoAnswer" in files["error.txt"]
    assert files["run/config.yaml"] == b"run:\n  name: demo\n"
    metrics = files["run/metrics.jsonl"].splitlines()
    assert len(metrics) == 200 and metrics[-1] == b'{"step": 400, "train/lo'
    assert json.loads(files["state/leases.json"]) == {"rollout-0": ["g00000007"]}
    assert files["state/worker_errors.txt"] == b"rollout-0: timed out\nrollout-1: its process ended"
    assert b"in waits_for_groups" in files[f"stacks/rollout-0-{other.pid}.txt"]
    assert b"state T" in files["stacks/answers.txt"]
    assert b"last words of rollout-0" in files[f"logs/rollout-0-{other.pid}.out"]
    states = {one["name"]: one for one in json.loads(files["processes.json"])}
    assert states["learner"]["state"] == "T" and states["rollout-0"]["rss_bytes"] > 2**20
    assert json.loads(files["machine.json"])["disks"][0]["free"] > 0
    versions = json.loads(files["versions.json"])
    assert {"python", "jax", "ray", "grpcio", "platform", "tandem commit"} <= set(versions)
    assert b" 123 " in files["files.txt"] and b"spool/step-00000000.bin" in files["files.txt"]
    assert other.poll() is None, "who is asked goes on"


def test_no_secret_is_in_an_archive(run_folder, start, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag=3")
    monkeypatch.setenv("HOME_MADE", "value-of-a-variable")
    monkeypatch.setenv("TANDEM_TOKEN", "tandem-token-value")
    (run_folder / "control").mkdir()
    for name in ("ca.pem", "cert.pem", "key.pem", "address"):
        (run_folder / "control" / name).write_text(PEM)
    start("learner", TOKEN, f"--header=Bearer {'q7' * 12}", PEM, "https://me:pass4word@host/x")
    (run_folder / "samples.jsonl").write_text(json.dumps({"completion": f"{KEY} {PEM}"}) + "\n")
    (run_folder / "rejected").mkdir()
    (run_folder / "rejected" / "version-00000001.jsonl").write_text(f'{{"key": "{TOKEN}"}}\n')
    sources = Sources(
        config=f"reward:\n  params: {{api_key: {'z8' * 12}}}\n",
        tables={"fleet": {"token": TOKEN, "key": PEM}},
        worker_errors=[f"rollout-0: refused {KEY}"],
        log_folders=[run_folder / "control"],
    )
    path = collect(run_folder, RunError(f"refused {TOKEN}", details=PEM), sources, lambda _: None)
    files = unpacked(path)
    assert {"run/samples.jsonl", "rejected/version-00000001.jsonl", "run/config.yaml"} <= set(files)
    secrets = [TOKEN, KEY, "MIGHAgEAMBMGByqGSM49", "c2VjcmV0", "value-of-a-variable"]
    secrets += ["tandem-token-value", "q7q7", "z8z8", "pass4word"]
    found = [(s, name) for s in secrets for name, data in files.items() if s.encode() in data]
    assert found == []
    assert not [name for name in files if "control/" in name or name.endswith(".pem")]
    for name in ("control/address", "control/key.pem"):
        with pytest.raises(PermissionError, match="holds a secret"):
            Redactor({}).tail(run_folder / name, 1000)
    assert json.loads(files["environment.json"])["XLA_FLAGS"] == "--xla_some_flag=3"
    assert b"refused <RAY_AUTH_TOKEN>" in files["PROBABLE_CAUSE.md"]


@pytest.mark.parametrize("bound", [500, 500 + GUARD_BYTES])
def test_a_cut_through_a_secret_leaves_no_half_of_it(tmp_path, bound):
    """Wherever the cut or the first byte read falls in it."""
    redactor, path = Redactor({"RAY_AUTH_TOKEN": TOKEN}), tmp_path / "worker.out"
    secret = f"{TOKEN}\n{PEM}"
    far = "." * (GUARD_BYTES + 1000)
    for left in range(0, len(secret) + 20, 5):
        path.write_text(far + secret + "." * (bound - left))
        seen = redactor.tail(path, 500)
        path.write_text("." * (bound - left) + secret + far)
        seen += redactor.head(path, 500)
        assert seen and not [p for p in (b"5f5", b"MIGH", b"SM49", b"mV0") if p in seen]


def test_numbers_and_names_that_resemble_secrets_stay(tmp_path):
    text = '{"rollout/tokens": 12345.678901234567, "time/per_token": 1.2345678901234567e-05}\n'
    text += "model: {tokenizer: /models/qwen3-tokenizer-long-name}\nmax_completion_tokens: 12\n"
    assert Redactor({"RAY_AUTH_MODE": "token", "LANG": "C.UTF-8"}).clean(text) == text


def test_a_part_that_fails_or_hangs_is_named_and_costs_no_other(tmp_path):
    def fails():
        raise KeyError("nothing here")

    bundle = Bundle(tmp_path, Redactor({}))
    parts = [
        ("first", fails),
        ("second", lambda: time.sleep(600)),
        ("third", lambda: Found(files={"a.txt": "kept"}, facts={"error": "it broke"})),
    ]
    title = bundle.fill(parts, part_s=0.2)  # pyright: ignore[reportArgumentType]
    files = unpacked(bundle.write())
    why = files["PROBABLE_CAUSE.md"].decode()
    assert "it broke" in title and files["a.txt"] == b"kept"
    assert "first: missing, KeyError: 'nothing here'" in why
    assert "second: missing, TimeoutError: second was not done within 0.2 s" in why
    assert "third: a.txt" in why
    late = Bundle(tmp_path, Redactor({}))
    late.fill([("first", lambda: Found()), *parts[2:]], all_s=-1.0)
    assert (
        b"third: missing, TimeoutError: no time was left"
        in unpacked(late.write())["PROBABLE_CAUSE.md"]
    )


@pytest.fixture
def unhurried(monkeypatch):
    """On a busy machine, too, the archive has what there is time for on an idle one."""
    monkeypatch.setattr(archive, "TOTAL_S", HANG_S)
    monkeypatch.setattr(Bundle.fill, "__defaults__", (HANG_S, HANG_S))


@pytest.fixture
def bounds(monkeypatch):
    """Of a file and of all: a sixteenth of the real ones, which take long to write and redact."""
    assert (FILE_BYTES, archive.TOTAL_BYTES) == (2**20, 64 * 2**20)
    file_bytes, total_bytes = FILE_BYTES // 16, archive.TOTAL_BYTES // 16
    for module in (archive, evidence):
        monkeypatch.setattr(module, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(archive, "TOTAL_BYTES", total_bytes)
    return file_bytes, total_bytes


@pytest.mark.usefixtures("unhurried")
def test_an_archive_is_bounded_whatever_the_run_left(run_folder, bounds):
    file_bytes, total_bytes = bounds
    (run_folder / "rejected").mkdir()
    for version in range(12):
        path = run_folder / "rejected" / f"version-{version:08d}.jsonl"
        path.write_text('{"token_ids": [' + "1, " * (file_bytes // 2) + "1]}\n")
    with (run_folder / "samples.jsonl").open("w") as file:
        file.writelines(json.dumps({"completion": "x" * 6_000}) + "\n" for _ in range(30))
    path = collect(run_folder, RunError("x"), Sources(), lambda _: None)
    files = unpacked(path)
    assert max(map(len, files.values())) <= file_bytes
    assert "rejected/version-00000011.jsonl" in files
    assert sum(name.startswith("rejected/") for name in files) == 8
    for line in files["run/samples.jsonl"].splitlines():
        json.loads(line)  # lines are whole
    many = Bundle(run_folder, Redactor({}))
    many.fill([("many", lambda: Found(files={f"{i}.txt": b"x" * file_bytes for i in range(80)}))])
    files = unpacked(many.write())
    assert sum(map(len, files.values())) <= total_bytes
    assert b"79.txt left out for its size" in files["PROBABLE_CAUSE.md"]


def test_where_no_file_can_grow_stderr_says_so_and_nothing_half_written_stays(run_folder):
    code = (
        "import resource, sys; from driver.postmortem.archive import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        "sys.exit(main(['--run', sys.argv[1]]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(run_folder)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 1
    assert "no post-mortem in" in ended.stderr and "File too large" in ended.stderr
    assert "probable cause: " in ended.stdout and "Traceback" not in ended.stderr
    assert not [p.name for p in run_folder.iterdir() if "postmortem" in p.name]


def test_a_driver_that_was_killed_outright_is_explained_afterwards(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    ended = subprocess.run([sys.executable, "-c", DRIVER, str(folder)], timeout=HANG_S)
    assert ended.returncode == -signal.SIGKILL
    assert main(["--run", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "probable cause: the driver was killed outright (SIGKILL)" in said
    files = unpacked(next(folder.glob("postmortem-*.tar.gz")))
    assert b"the last checkpoint is of step 5" in files["PROBABLE_CAUSE.md"]
    [state] = json.loads(files["processes.json"])
    assert (state["name"], state["state"]) == ("driver", "")


def test_how_a_failed_run_ended_is_read_from_its_folder(tmp_path, capsys):
    status = StatusFile(tmp_path, run="demo", run_id="demo-1")
    status.end(ExitCode.FAILED, "the learner died during 'update'; --resume goes on")
    assert main(["--run", str(tmp_path)]) == 0
    assert "probable cause: the learner process was killed" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["--run", str(tmp_path / "nothing")]) == 2
    assert "no status.json there: give the run's output folder" in capsys.readouterr().err


def test_the_error_of_the_run_travels_on_from_a_folder_that_is_gone(tmp_path, capsys):
    with pytest.raises(LearnerLost, match="the learner died"):
        try:
            raise LearnerLost("the learner died during 'update'")
        except LearnerLost as error:
            assert collect(tmp_path / "gone", error, Sources(), lambda _: None) is None
            raise
    assert "no post-mortem in" in capsys.readouterr().err


def test_the_processes_of_a_run_are_listed_the_newest_first(run_folder, start):
    start("learner")
    start("rollout-0")
    assert [process.name for process in read_processes(run_folder)] == ["rollout-0", "learner"]


def test_a_crash_before_the_resume_is_not_its_cause(run_folder, tmp_path):
    stacks = run_folder / "stacks"
    stacks.mkdir()
    record = {"name": "learner", "pid": 1, "host": "elsewhere", "started": 1, "logs": []}
    for name, age_s in (("before", 3600), ("since", 0)):
        path = stacks / f"{name}-1.txt"
        path.write_text(json.dumps(record) + "\nFatal Python error: Segmentation fault\n")
        os.utime(path, (time.time() - age_s,) * 2)
    archive = collect(run_folder, RunError("the learner died"), Sources(), print)
    shown = unpacked(archive)["PROBABLE_CAUSE.md"].decode()
    assert "since-1 crashed in native code" in shown and "before-1" not in shown.split("## In")[0]


def test_only_the_session_of_this_run_is_read(run_folder, tmp_path, monkeypatch):
    sessions = {name: tmp_path / "ray" / name / "logs" for name in ("own", "session_latest")}
    for name, logs in sessions.items():
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(f"error of {name}\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    files = unpacked(collect(run_folder, None, Sources(log_folders=[sessions["own"]]), print))
    assert files["logs/ray/raylet.err"] == b"error of own\n"
    files = unpacked(collect(run_folder, None, Sources(), print))
    assert not [name for name in files if name.startswith("logs/ray/")]


def test_no_link_and_no_path_that_a_file_of_the_run_names_is_followed_R13(run_folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    private = outside / "private.txt"
    private.write_text("words of somebody else\n")
    for name in ("worker-1.out", "version-00000001.jsonl"):
        (outside / name).write_text("words of somebody else\n")
    stacks = run_folder / "stacks"
    stacks.mkdir()
    record = {"name": "learner", "pid": 1, "host": socket.gethostname(), "started": 1}
    named = [str(private), str(outside / "worker-1.out"), str(run_folder / ".." / "outside")]
    (stacks / "learner-1.txt").write_text(json.dumps(record | {"logs": named}) + "\n")
    (stacks / "x.txt").symlink_to(private)
    (run_folder / "rejected").symlink_to(outside)
    for name in ("error.txt", "config.yaml", "eval.jsonl", "samples.jsonl"):
        (run_folder / name).symlink_to(private)
    os.mkfifo(run_folder / "identity.json")
    files = unpacked(collect(run_folder, None, Sources(), print))
    assert not [name for name, data in files.items() if b"words of somebody" in data]
    refused = {name for name, data in files.items() if data.startswith(b"refused: ")}
    assert refused == {
        *(
            "stacks/x.txt",
            "run/error.txt",
            "run/config.yaml",
            "run/eval.jsonl",
            "run/samples.jsonl",
        ),
        *("rejected/version-00000001.jsonl", "logs/learner-1-private.txt", "logs/learner-1.out"),
    }
    assert b"private.txt" in files["logs/learner-1-private.txt"]
    assert b"x.txt is a link" in files["stacks/x.txt"]


def test_the_status_of_a_run_is_not_read_through_a_link_R13(run_folder, tmp_path):
    (tmp_path / "other.json").write_text('{"reason": "words of somebody else", "state": "failed"}')
    (run_folder / "status.json").unlink()
    (run_folder / "status.json").symlink_to(tmp_path / "other.json")
    files = unpacked(collect(run_folder, None, Sources(), print))
    assert not [name for name, data in files.items() if b"words of somebody" in data]


def test_what_other_hosts_have_sent_is_here_and_what_is_missing_is_said_F3(run_folder):
    sent = {"stacks.txt": "Thread 0x1", "worker-1.err": "the last line"}
    sources = Sources(
        tables={"fleet": [], "elsewhere": {"rollout-1 on b": sent, "learner on c": {}}},
        hosts=lambda: [
            {"host": "b", "address": "10.0.0.2", "alive": True, "end": ""},
            {"host": "c", "address": "10.0.0.3", "alive": False, "end": "health check failed"},
        ],
    )
    error = RunError("the learner did not answer 'health' within 60 s")
    files = unpacked(collect(run_folder, error, sources, lambda _: None))
    assert files["elsewhere/rollout-1-on-b/worker-1.err"] == b"the last line"
    assert b"10.0.0.3" in files["state/hosts.json"] and "state/elsewhere.json" not in files
    page = files["PROBABLE_CAUSE.md"].decode()
    assert page.startswith("# Ray counts a host as dead that was in the cluster: c")
    assert "- c (10.0.0.3): health check failed" in page
    missing = page.partition("## Not in this archive")[2]
    assert "learner on c: stacks and logs" in missing and "rollout-1" not in missing


def test_hosts_that_cannot_be_asked_cost_no_other_part(run_folder):
    def hosts():
        raise ConnectionError("no head answers")

    files = unpacked(collect(run_folder, RunError("x"), Sources(hosts=hosts), lambda _: None))
    page = files["PROBABLE_CAUSE.md"].decode()
    assert "hosts of the cluster: missing, ConnectionError: no head answers" in page
    assert "Not in this archive" not in page
