"""Several hosts on one machine: namespaces of Linux that a bridge joins.

Each host has processes, network, name, /tmp and /dev/shm of its own, and shares every other file. A
host that is killed or unplugged sends nothing more, not even the end of its connections, as a host
that lost its power or its network does.
"""

import contextlib
import itertools
import os
import pathlib
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import psutil

from tests.deadlines import wait_until

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = "10.213.0."
_KINDS = ("--mount", "--net", "--pid", "--uts", "--ipc")
_INIT = "while :; do sleep 3600 & wait $!; done"
"""A shell, since the first process of a host has to collect those that lost their parent."""


def reason_against() -> str:
    """Why this machine can have no such hosts; empty where it can."""
    for program in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            return f"hosts are made by {program}, which is not installed"
    tried = subprocess.run(["unshare", *_KINDS, "--fork", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"namespaces are not allowed here: {tried.stderr.strip()}"
    bridge = f"tnd{secrets.token_hex(3)}"
    tried = subprocess.run(
        ["ip", "link", "add", bridge, "type", "bridge"], capture_output=True, text=True
    )
    if tried.returncode:
        return f"network bridges are not allowed here: {tried.stderr.strip()}"
    _run("ip", "link", "del", bridge)
    return ""


class Host:
    """One host; use `Network.add_host`."""

    def __init__(self, name: str, address: str, bridge: str, folder: pathlib.Path):
        """Args:
        name: its host name, short.
        address: IPv4, in the network of the bridge.
        bridge: that it is plugged into.
        folder: below which its /tmp lies.
        """
        self.name, self.address = name, address
        self._cable = f"{bridge}{address.rpartition('.')[2]}"
        self.tmp = folder / name / "tmp"
        """Where its /tmp lies for this process."""
        self.tmp.mkdir(parents=True, mode=0o1777)
        boot = [
            f"mount --bind {shlex.quote(str(self.tmp))} /tmp",
            "mount -t tmpfs tmpfs /dev/shm",
            "ip link set lo up",
            f"hostname {shlex.quote(name)}",  # shows that all before has worked
            _INIT,
        ]
        self._unshare = subprocess.Popen(
            [
                *("unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc"),
                *("bash", "-ec", "\n".join(boot)),
            ],
            stdin=subprocess.DEVNULL,
        )
        wait_until(self._has_booted, f"the start of host {name}")
        inside = f"i{self._cable}"
        _run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", inside)
        _run("ip", "link", "set", inside, "netns", str(self._init_pid), "name", "eth0")
        _run("ip", "link", "set", self._cable, "master", bridge, "up")
        self.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path
    ) -> subprocess.Popen:
        """Starts a command on this host, in the root of the checkout; its code is that returned.

        Args:
            command: program and arguments.
            environment: all of it.
            log: gets its output.
        """
        with log.open("a") as file:
            return subprocess.Popen(
                [*self._enter, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def run(self, *command: str) -> None:
        """Runs a command on this host to its end.

        Raises:
            RuntimeError: with what it printed, if it fails.
        """
        _run(*self._enter, *command)

    def succeeds(self, *command: str) -> bool:
        """Whether a command on this host ends with code 0."""
        return subprocess.run([*self._enter, *command], capture_output=True).returncode == 0

    def kill(self) -> None:
        """The host loses its power."""
        with contextlib.suppress(RuntimeError):
            self.unplug()
        self._unshare.kill()  # and with it, through --kill-child, all that runs here
        self._unshare.wait(30)
        # Left alone, it stays until the last connection of the host has timed out.
        with contextlib.suppress(RuntimeError):
            _run("ip", "link", "del", self._cable)

    def unplug(self) -> None:
        """Cuts the host off the network; its processes go on."""
        _run("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        """Undoes `unplug`."""
        _run("ip", "link", "set", self._cable, "up")

    def block(self, other: "Host") -> None:
        """Drops everything between this host and another, silently; both reach all others."""
        for one, far in ((self, other), (other, self)):
            one.run("ip", "route", "add", "blackhole", f"{far.address}/32")

    def unblock(self, other: "Host") -> None:
        """Undoes `block`."""
        for one, far in ((self, other), (other, self)):
            one.run("ip", "route", "del", "blackhole", f"{far.address}/32")

    @property
    def _init_pid(self) -> int:
        [init] = psutil.Process(self._unshare.pid).children()
        return init.pid

    @property
    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self._init_pid}", *_KINDS, "env", "-C", str(ROOT)]

    def _has_booted(self) -> bool:
        assert self._unshare.poll() is None, f"host {self.name} ended at its start"
        with contextlib.suppress(ValueError, OSError, psutil.Error):
            return self.succeeds("sh", "-c", f"test $(hostname) = {self.name}")
        return False


class Network:
    """Owns a bridge and the hosts that were plugged into it."""

    def __init__(self, folder: pathlib.Path):
        """Args:
        folder: of the machine, outside /tmp, for what the hosts keep.
        """
        self._folder = folder
        self._bridge = f"tnd{secrets.token_hex(3)}"
        self._hosts: list[Host] = []
        self._numbers = itertools.count(1)
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "link", "set", self._bridge, "up")

    def add_host(self, name: str) -> Host:
        """Starts a host that reaches all others."""
        address = f"{PREFIX}{next(self._numbers)}"
        host = Host(name, address, self._bridge, self._folder)
        self._hosts.append(host)
        return host

    def close(self) -> None:
        """Ends all hosts and removes the bridge."""
        for host in reversed(self._hosts):
            host.kill()
        _run("ip", "link", "del", self._bridge)


@contextlib.contextmanager
def open_network(folder: pathlib.Path) -> Iterator[Network]:
    """A network that is closed with the block."""
    network = Network(folder)
    try:
        yield network
    finally:
        network.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def plain_environment() -> dict[str, str]:
    """This process's environment without proxies, which the hosts have none of."""
    return {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
