"""Serves the dashboard of a run, or shows the link of one that is served.

    python -m dashboard --run DIR               a running or finished run
    python -m dashboard --compare DIR1 DIR2     two runs side by side
    python -m dashboard --run DIR --link        link and control token of the driver's dashboard

A driver starts a dashboard itself (log.dashboard.enabled); `--link` shows its link.
"""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from dashboard import auth
from dashboard.app import build
from dashboard.auth import NoLink, Tokens
from dashboard.listener import PortTaken, answers, bind, url_of
from dashboard.runs.run_follower import RunFollower
from dashboard.server import DashboardServer, Orphaned
from services.process import stacks
from services.process.terminal_text import protect_terminal
from services.wire.reachable import is_loopback

NOT_LOOPBACK = (
    "warning: the dashboard listens on {host}, and its tokens cross the network unencrypted: "
    "prefer 127.0.0.1 and a tunnel (ssh -L {port}:127.0.0.1:{port} HOST)"
)


FILES = (
    *("status.json", "config.yaml", "metrics.jsonl", "ledger.jsonl"),
    *("timeline.jsonl", "samples.jsonl", "eval.jsonl"),
)
"""Files of a run; all but the first may be missing, but each must be readable."""


class CannotServe(Exception):
    """The dashboard cannot start; the message says what to do, and no traceback is shown."""


def parser() -> argparse.ArgumentParser:
    """The arguments of `python -m dashboard`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m dashboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=pathlib.Path, metavar="DIR", help="output folder of a run")
    what.add_argument(
        "--compare", type=pathlib.Path, nargs=2, metavar=("DIR1", "DIR2"), help="of two runs"
    )
    parser.add_argument(
        "--link", action="store_true", help="print link and control token of a driver's dashboard"
    )
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=_port, help="to listen on (default: 8470, or a free port if it is taken)"
    )
    child = parser.add_argument_group("used by the driver for the dashboard that it starts")
    child.add_argument("--fd", type=int, help="inherited listening socket")
    child.add_argument("--driver-pid", type=int, help="parent process; this process ends after it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 if the dashboard cannot start, 130 for Ctrl-C."""
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    try:
        folders = [_absolute(folder) for folder in given.compare or [given.run]]
        names = [check_run(folder) for folder in folders]
        if given.link:
            _show_link(given, folders[0])
        elif given.fd is not None:
            _serve_for_driver(folders[0], names[0], given.fd, given.driver_pid)
        else:
            _serve(folders, names[0], given.host, given.port)
        return 0
    except (CannotServe, NoLink, PortTaken) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


def _absolute(folder: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(folder))  # pathlib's own fails on a link to itself


def check_run(folder: pathlib.Path) -> str:
    """Checks that the folder is that of a run and readable; returns the run's id.

    Raises:
        CannotServe: naming the folder.
    """
    try:
        if not folder.exists():
            raise CannotServe(f"{folder} does not exist: give the output folder of a run")
        if not folder.is_dir():
            raise CannotServe(f"{folder} is a file: give the output folder of a run")
        if not (folder / "status.json").exists():
            raise CannotServe(
                f"{folder} is not a run's folder: it has no status.json; give the folder that "
                "run.output_dir names"
            )
        for name in FILES:
            with contextlib.suppress(FileNotFoundError):
                (folder / name).open("rb").close()
        return str(json.loads((folder / "status.json").read_bytes())["run_id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return folder.name  # a truncated status, as after a full disk, is shown as unknown
    except PermissionError as error:
        raise CannotServe(
            f"{error.filename} is not readable: the run belongs to another user; ask that user for "
            "the link or for a copy of the folder"
        ) from error
    except OSError as error:  # as for a name that is too long, or a folder in place of a file
        raise CannotServe(f"{error.filename} cannot be read: {error.strerror}") from error


def _show_link(given: argparse.Namespace, folder: pathlib.Path) -> None:
    if given.compare:
        raise CannotServe("--link needs one run: use it with --run")
    url, tokens = auth.read_access(folder / auth.FOLDER)
    print(auth.link(url, tokens))
    print(f"control token: {tokens.control}")
    if not answers(url):
        print(
            f"no server answers at {url}: the driver has ended, or it runs on another host (see "
            "status.json), which `ssh -L` reaches",
            file=sys.stderr,
            flush=True,
        )


def _serve_for_driver(folder: pathlib.Path, name: str, fd: int, driver_pid: int) -> None:
    """Serves on the driver's socket, with the driver's tokens, until the driver ends."""
    stacks.register(folder, "dashboard")
    access = folder / auth.FOLDER
    orphaned = Orphaned(driver_pid, access / "view_token")
    _, tokens = auth.read_access(access)
    listener = socket.socket(fileno=fd)
    # Another pid belongs to a driver that resumed the run and is about to take over.
    follower = RunFollower(folder, driver_is_gone=lambda pid: pid == driver_pid and orphaned())
    _server([follower], name, tokens, listener).serve_on(listener, orphaned)


def _serve(folders: list[pathlib.Path], name: str, host: str, port: int | None) -> None:
    with contextlib.closing(bind(host, port)) as listener:
        tokens, url = Tokens.create(), url_of(listener)
        if not is_loopback(host):
            print(NOT_LOOPBACK.format(host=host, port=listener.getsockname()[1]), flush=True)
        with _announcement(url, tokens) as announce:
            followers = [RunFollower(folder) for folder in folders]
            server = _server(followers, name, tokens, listener)
            announce()
            server.serve_on(listener)


@contextlib.contextmanager
def _announcement(url: str, tokens: Tokens) -> Iterator[Callable[[], None]]:
    """A function that prints where the dashboard is.

    A terminal shows the whole link. A file or pipe may be kept as a log: it gets only the folder
    that holds the tokens.
    """
    if sys.stdout.isatty():
        link = f"dashboard: {auth.link(url, tokens)}\ncontrol token: {tokens.control}"
        yield lambda: print(link, flush=True)
        return
    place = pathlib.Path(tempfile.mkdtemp(prefix="tandem-dashboard-"))
    try:
        auth.write_access(place / auth.FOLDER, url, tokens)
        yield lambda: print(f"dashboard: {url} (its tokens: {place / auth.FOLDER})", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _server(
    followers: list[RunFollower], name: str, tokens: Tokens, listener: socket.socket
) -> DashboardServer:
    host, port = listener.getsockname()[:2]
    app = build(
        followers[0],
        tokens,
        loopback=is_loopback(host),
        compared=followers[1] if len(followers) == 2 else None,
        cookie=f"{name}_{port}",  # a run may be served twice
    )
    return DashboardServer(app, followers[0])


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 (any free port) to 65535")
    return int(text)


if __name__ == "__main__":
    protect_terminal()
    sys.exit(main())
