"""The dashboard of a run: a process of its own, which this one starts, starts again and ends.

It only reads the run's folder (`dashboard/`), so that nothing in it can hold a step up;
nothing here may either: whatever fails is one line, and the run goes on without a dashboard.

The socket is bound here and inherited, so that the URL is known before anything else starts, and
stays the same when the process is replaced. After a driver was killed, the next one takes over port
and tokens of the dashboard that was left: pages that are open go on.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from dashboard import auth
from dashboard.auth import NoLink, Tokens
from dashboard.listener import PortTaken, bind, url_of
from driver.config.sections.log import DashboardConfig
from driver.errors import RunError
from services.wire.reachable import is_loopback
from services.wire.secret_text import without_secrets

LOG = "dashboard.log"
METADATA_KEY = "tandem_dashboard"
"""Of a Ray job's metadata."""
RESTARTS = 3
RESTART_PAUSE_S = 1.0
NICENESS = 5
"""Beyond that of the run: training comes first."""
END_S = 10.0
"""Time for it to send its viewers the end of the run, and what they show of it: most need far less,
and without viewers it ends at once."""
TAKE_OVER_S = 5.0
"""For the dashboard of a driver that was killed to notice that this one wants its port."""


class DashboardPortTaken(RunError):
    """The dashboard cannot listen on its configured address."""

    exit_code = 2


class Dashboard:
    """One run's dashboard, with its socket bound; `start` makes it answer.

    Args:
        folder: of the run.
        listener: bound; is closed by the owner of this object.
    """

    def __init__(self, folder: pathlib.Path, listener: socket.socket):
        self.url = url_of(listener)
        self._folder = folder
        self._listener = listener
        self._say: Callable[[str], None] = lambda text: None
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: threading.Thread | None = None

    def start(self, say: Callable[[str], None]) -> None:
        """Starts the process and shows its address; never waits and never raises.

        Args:
            say: shows one line; called from another thread too.
        """
        self._say = say
        if not is_loopback(self._listener.getsockname()[0]):
            say(
                f"the dashboard at {self.url} is not on loopback, and its tokens cross the network "
                "unencrypted: log.dashboard.host=127.0.0.1 and an ssh tunnel are safer"
            )
        self._watch = threading.Thread(target=self._keep, name="dashboard", daemon=True)
        self._watch.start()
        say(self._announcement())

    def _announcement(self) -> str:
        """The whole link for a terminal; what goes elsewhere may be kept, and has no token."""
        if sys.stdout.isatty():
            with contextlib.suppress(NoLink):
                return f"dashboard: {auth.link(*auth.read_access(self._folder / auth.FOLDER))}"
        return (
            f"dashboard: {self.url} (link with its token: python -m dashboard --run "
            f"{self._folder} --link)"
        )

    def stop(self) -> None:
        """Lets it send the end of the run to its viewers, then ends it, within END_S."""
        self._ended.set()
        deadline = time.monotonic() + END_S
        for send in ("terminate", "kill"):
            process = self._process
            if process is not None and process.poll() is None:
                getattr(process, send)()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.2, deadline - time.monotonic()))
        if self._watch is not None:
            self._watch.join(0.2)

    def _keep(self) -> None:
        """Starts the process, and again when it ends, a few times."""
        for left in range(RESTARTS, -1, -1):
            try:
                code = self._serve_once()
            except OSError as error:
                self._say(f"no dashboard: {error}; the run goes on without one")
                return
            if self._ended.is_set():
                return
            again = (
                f"starting it again, {left} restarts left" if left else "it is not started again"
            )
            self._say(f"the dashboard ended (exit code {code}, see {LOG}): {again}")
            if not left or self._ended.wait(RESTART_PAUSE_S * (RESTARTS + 1 - left)):
                return

    def _serve_once(self) -> int:
        descriptor = self._listener.fileno()
        command = [sys.executable, "-m", "dashboard", "--run", str(self._folder)]
        with (self._folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--fd", str(descriptor), "--driver-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(descriptor,),
                cwd=pathlib.Path(__file__).resolve().parents[2],
                env=without_secrets(os.environ),
                start_new_session=True,  # Ctrl-C is for the driver
            )
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, min(19, own + NICENESS))
        if self._ended.is_set():
            self._process.terminate()
        return self._process.wait()


@contextlib.contextmanager
def open_dashboard(config: DashboardConfig, folder: pathlib.Path) -> Iterator[Dashboard | None]:
    """Binds the dashboard's socket and writes URL and tokens to the run's folder; removes them and
    ends the process with the block. None where it is disabled.

    Raises:
        DashboardPortTaken: naming the key, before anything is started.
    """
    if not config.enabled:
        yield None
        return
    with contextlib.ExitStack() as stack:
        port, tokens = _left_by_killed(folder)
        access = folder / auth.FOLDER
        try:  # new files, which a dashboard that was left sees: it makes room for this one
            auth.write_access(access, "", tokens or Tokens.create())
        except OSError as error:  # as on a full disk, which the run itself reports
            print(f"no dashboard: {error}", file=sys.stderr, flush=True)
            yield None
            return
        stack.callback(shutil.rmtree, access, ignore_errors=True)
        dashboard = Dashboard(folder, stack.enter_context(contextlib.closing(_bind(config, port))))
        (access / "url").write_text(dashboard.url)
        stack.callback(dashboard.stop)
        yield dashboard


def _left_by_killed(folder: pathlib.Path) -> tuple[int | None, Tokens | None]:
    """Port and tokens of the dashboard that a killed driver has left; None for what is not there,
    or was not for this user alone.
    """
    access = folder / auth.FOLDER
    try:
        found = access.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
            return None, None
        url, tokens = auth.read_access(access)
        port = urlsplit(url).port
    except (NoLink, OSError, ValueError):  # ValueError: what was killed while it wrote
        return None, None
    whole = min(len(tokens.view), len(tokens.control)) >= auth.TOKEN_BYTES
    return port, tokens if whole else None


def _bind(config: DashboardConfig, left: int | None) -> socket.socket:
    """The configured port, else the one that a killed driver has left, else what is free."""
    wanted = left if config.port is None else config.port
    deadline = time.monotonic() + (TAKE_OVER_S if wanted else 0)
    while True:
        try:
            return bind(config.host, wanted)
        except PortTaken as error:
            if time.monotonic() > deadline and wanted != config.port:
                wanted = config.port
            elif time.monotonic() > deadline:
                raise DashboardPortTaken(
                    f"log.dashboard.port={config.port}, log.dashboard.host={config.host}: {error}; "
                    "choose another port, null for a free one, or log.dashboard.enabled=false"
                ) from error
        time.sleep(0.1)
