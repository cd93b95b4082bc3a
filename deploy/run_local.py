"""Runs one configuration on a Ray head of its own on this machine, and stops what it started.

    python deploy/run_local.py --config deploy/runs/demo_cpu.yaml [--set key=value ...]

The head listens on loopback only and asks for a token that exists for this run alone. The run goes
through `ray job submit`, as on a cluster. Ctrl-C stops the job (which writes a checkpoint), then
the head. Exit code: 0 when the job succeeded, 130 or 143 after a signal, 1 otherwise.
"""

import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable

SUMMARY = re.compile(r"[\w.-]+: accuracy .+ -> .+, reward .+ -> .+, steps \d+, seconds \d+$")
CHATTER = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+\s+(INFO|SUCC) |.*WARNING.* is now ignored")
"""Lines of the job client about uploads and its own commands; they are not shown."""
DASHBOARD = re.compile(r"dashboard: (\S+) \(link with its token: .+ --run (.+) --link\)$")
NO_AGENT = "No available agent to submit job"
SUBMISSIONS = 5
"""How often a job is submitted to a head that is not ready for it yet, as on a busy machine."""
HEAD_START_S = 90
LONGEST_FOLDER = 36
"""Bytes of the path of a head's folder: Ray adds up to 71 for its sockets, and 107 are allowed."""
JOB_STOP_S = 45
"""How long a stopped job may take for its last checkpoint."""


class Stopped(Exception):
    """A signal asked for the end."""

    def __init__(self, signum: int):
        self.exit_code = 128 + signum


def _on_signal(signum: int, frame) -> None:
    raise Stopped(signum)


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def head_environment() -> dict[str, str]:
    """Environment of a head on loopback and of all that joins it, with a new token."""
    environment = {
        # Ray's own default is 15: the learner would yield to everything else on the machine.
        "RAY_worker_niceness": "0",
        # Else it starts a Python process for each CPU at once, which no actor of a run uses.
        "RAY_prestart_worker_first_driver": "0",
        # Has Ray take 127.0.0.1 for this host: else most of its processes listen on every address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        **os.environ,
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "no_proxy": ",".join(filter(None, [os.environ.get("no_proxy"), "127.0.0.1,localhost"])),
    }
    environment.pop("RAY_ADDRESS", None)
    return environment


def head_folder() -> pathlib.Path:
    """Makes a folder for a head: below TMPDIR, or in /tmp where that is too long for Ray.

    Raises:
        SystemExit: if there is no such folder; names what to set.
    """
    wanted = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    longest = LONGEST_FOLDER - len("/tandem-ray-12345678")
    for parent in (wanted, "/tmp"):
        if len(os.fsencode(parent)) <= longest and os.access(parent, os.W_OK | os.X_OK):
            return pathlib.Path(tempfile.mkdtemp(prefix="tandem-ray-", dir=parent))
    raise SystemExit(
        f"neither {wanted} (TMPDIR, RAY_TMPDIR) nor /tmp can hold Ray's sockets: set RAY_TMPDIR to "
        f"a folder that can be written to, with a path of at most {longest} bytes"
    )


def start_head(
    environment: dict[str, str], folder: str, log, *options: str, port: int = 0
) -> tuple[subprocess.Popen, str]:
    """Starts a Ray head in a process group of its own; returns it and its job address."""
    dashboard, agent, client = free_ports(3)  # Ray's own choices collide with another head's
    tpu_logs = pathlib.Path(folder) / "tpu_logs"  # else Ray shows those of other programs
    tpu_logs.mkdir()
    # Sockets of its multiprocessing lie in TMPDIR itself, whose path must be short for them too.
    own = {"TMPDIR": os.path.dirname(folder)}
    head = subprocess.Popen(
        [
            *("ray", "start", "--head", "--block", "--disable-usage-stats"),
            *("--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", folder),
            *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)),
            *("--dashboard-agent-listen-port", str(agent), "--ray-client-server-port", str(client)),
            *options,
        ],
        env={"TPU_LOG_DIR": str(tpu_logs), **environment, **own},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    return head, f"http://127.0.0.1:{dashboard}"


def wait_for_head(head: subprocess.Popen, address: str, log_path: pathlib.Path) -> None:
    """Waits until the job server answers.

    Raises:
        SystemExit: if the head ends or does not answer in time; names its log.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + HEAD_START_S
    while time.monotonic() < deadline:
        if head.poll() is not None:
            raise SystemExit(f"the Ray head ended at its start; its log:\n{log_path.read_text()}")
        try:
            opener.open(f"{address}/api/version", timeout=2)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"the Ray head at {address} did not answer in {HEAD_START_S} s: {log_path}")


class Relay(threading.Thread):
    """Passes the job's output on line by line, and keeps the run's line for machines.

    `ray job submit` has more to say after the job, so that line is to be printed last.
    """

    def __init__(self, lines: Iterable[str]):
        super().__init__(name="relay", daemon=True)
        self._lines = lines
        self.summary = ""
        self.refusal = ""
        """What the head answered while it had no agent that could take the job."""
        self._held: list[str] | None = None
        """A traceback of the client in place of the job's output; of no use after a refusal."""

    def run(self) -> None:
        """Reads the output to its end."""
        is_first = True
        for line in self._lines:
            if SUMMARY.match(line):
                self.summary = line.rstrip()
            elif NO_AGENT in line:
                self.refusal = line.strip()
            elif not CHATTER.match(line):
                if is_first and line.startswith("Traceback "):
                    self._held = []
                is_first = False
                if self._held is None:
                    print(whole_link(line), end="", flush=True)
                else:
                    self._held.append(line)
        if self._held and not self.refusal:
            print("".join(self._held), end="", flush=True)


def whole_link(line: str) -> str:
    """Adds the token to the line that names the dashboard, on a terminal only: the job's own output
    is kept in a log of the cluster and has none.
    """
    found = DASHBOARD.match(line)
    if found is None or not sys.stdout.isatty():
        return line
    try:
        token = (pathlib.Path(found[2]) / "dashboard" / "view_token").read_text()
    except OSError:  # the run is over already
        return line
    return f"dashboard: {found[1]}/?token={token}\n"


def submit(
    address: str,
    job_id: str,
    root: pathlib.Path,
    arguments: list[str],
    environment: dict[str, str],
) -> subprocess.Popen:
    """Submits the run as a job of the head; the process returned ends with the job."""
    return subprocess.Popen(
        [
            *("ray", "job", "submit", "--address", address, "--submission-id", job_id),
            *("--log-style", "record", "--working-dir", str(root)),
            *("--", "python", "-m", "driver", *arguments),
        ],
        env={**environment, "RAY_ADDRESS": address},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )


def stop_job(address: str, job_id: str, environment: dict[str, str]) -> None:
    """Sends the job SIGTERM and waits for its orderly end."""
    try:
        subprocess.run(
            ["ray", "job", "stop", "--address", address, job_id],
            env={**environment, "RAY_ADDRESS": address},
            timeout=JOB_STOP_S + 15,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        print(f"the job did not end in {JOB_STOP_S} s and is ended with the head", flush=True)


def end_group(process: subprocess.Popen, grace_s: float) -> None:
    """Ends a process and all that it started: SIGTERM, then SIGKILL."""
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, signum)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def main(arguments: list[str]) -> int:
    """Runs the job on a head of its own; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    # An error in the configuration is reported before anything is started.
    checked = [sys.executable, "-m", "driver", *arguments, "--print-config"]
    code = subprocess.run(checked, stdout=subprocess.DEVNULL).returncode
    if code:
        return code
    signal.signal(signal.SIGINT, _on_signal)
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGHUP, _on_signal)
    root = pathlib.Path(__file__).resolve().parents[1]
    folder = head_folder()
    environment = head_environment() | {
        "RAY_JOB_STOP_WAIT_TIME_S": str(JOB_STOP_S),
        "TANDEM_HOME": str(pathlib.Path.cwd()),
    }
    job, output, job_id, succeeded = None, None, f"tandem-{secrets.token_hex(4)}", False
    refusal = ""
    log_path = folder / "head.log"
    log = log_path.open("w")
    print("starting a Ray head on loopback", flush=True)
    head, address = start_head(environment, str(folder), log)
    try:
        wait_for_head(head, address, log_path)
        for _ in range(SUBMISSIONS):
            job = submit(address, job_id, root, arguments, environment)
            assert job.stdout is not None
            output = Relay(job.stdout)
            output.start()
            job.wait()
            output.join(JOB_STOP_S)
            refusal = output.refusal
            if not refusal:
                break
            print("the Ray head is not ready for a job yet; trying again", flush=True)
            time.sleep(3)
        else:
            print(f"the Ray head refused the job {SUBMISSIONS} times: {refusal}", flush=True)
        succeeded = job is not None and job.wait() == 0
        return 0 if succeeded else 1
    except Stopped as stopped:
        if output is not None:
            print("stopping the job; a second Ctrl-C ends it without a checkpoint", flush=True)
            stop_job(address, job_id, environment)
            output.join(JOB_STOP_S)
        return stopped.exit_code
    finally:
        print("stopping the Ray head", flush=True)
        if job is not None:
            end_group(job, 10)
        end_group(head, 20)
        log.close()
        if succeeded:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"logs of the Ray head and its jobs: {folder}", file=sys.stderr)
        if output is not None and output.summary:
            print(output.summary, flush=True)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(main(sys.argv[1:]))
