"""The Ray cluster of a run: connecting to it, and reserving room on it.

Without an address a local cluster is started for this run alone, on loopback and with a token of
its own (`driver/config/ray_environment.py`). Inside `ray job submit`, or with RAY_ADDRESS set, the
existing one is joined.
"""

import contextlib
import logging
import os
import pathlib
import signal
import socket
import time
from collections.abc import Collection, Mapping
from typing import Any

import psutil
import ray
from ray.client_builder import ClientContext
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from driver.config.ray_environment import joins_cluster
from driver.config.sections.placement import PlacementConfig, Resources
from driver.config.wording import counted
from driver.errors import RunError
from driver.signals import Interrupted, StopSignal
from services.wire.host_port import split_address
from services.wire.reachable import is_loopback

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Of Ray, in the environment of a submitted job."""
LEAST_STOP_S = 30
"""For a job that is stopped to write a checkpoint; less is warned of."""
STARTS = 3
"""Of a local cluster that does not come up in time."""
DIAL_S = 5.0


class ResourcesNotMet(RunError):
    """The cluster cannot fit what the run asks for."""

    exit_code = 3


class NoCluster(RunError):
    """The cluster that the environment names cannot be joined."""

    exit_code = 3


class BadAddress(RunError):
    """An address in the configuration that no host has."""

    exit_code = 2


class OpenNetwork(RunError):
    """The keys of the run would travel where others may read them."""

    exit_code = 2


def check_bind_host(host: str) -> None:
    """Refuses what cannot be an address, before anything is started.

    Raises:
        BadAddress: naming the key.
    """
    try:
        socket.getaddrinfo(host or "?", None)
    except OSError as error:
        raise BadAddress(
            f"placement.bind_host={host!r} is no address ({error.strerror}): use 127.0.0.1 or ::1 "
            "on one machine, 0.0.0.0 or :: on a cluster, without brackets and port"
        ) from error


def check_network(config: PlacementConfig, environ: Mapping[str, str]) -> None:
    """Refuses a cluster whose traffic others may read, before a key of the run travels on it.

    Raises:
        OpenNetwork: naming the keys.
    """
    encrypted = environ.get("RAY_USE_TLS", "").lower() in ("1", "true")
    if is_loopback(config.bind_host) or not joins_cluster(environ):
        return
    if not (encrypted or config.private_network):
        raise OpenNetwork(
            f"placement.bind_host={config.bind_host} is reached from other hosts, and Ray carries "
            "the keys of the run's processes between them without encryption: give Ray TLS "
            "(RAY_USE_TLS=1 and its certificates on every node), or set "
            "placement.private_network=true where nobody else can listen on the network"
        )


def stop_notice(environ: Mapping[str, str]) -> str:
    """What a submitted job must know of its stop, as its head has it; '' where nothing."""
    wait = environ.get("RAY_JOB_STOP_WAIT_TIME_S", "3")
    if JOB_VARIABLE not in environ or not wait.isdigit() or int(wait) >= LEAST_STOP_S:
        return ""
    return (
        f"`ray job stop` kills this job after {wait} s, perhaps before its checkpoint is written: "
        "export RAY_JOB_STOP_WAIT_TIME_S=600 before `ray start` on the head"
    )


def connect(
    namespace: str, stop: StopSignal, metadata: Mapping[str, str] | None = None
) -> list[pathlib.Path]:
    """Joins the cluster of the environment, or starts a local one that ends with this process.

    Args:
        namespace: of the actors.
        stop: is installed again after Ray has set handlers of its own.
        metadata: shown in the cluster's list of jobs for a driver that was not submitted; that of
            a submitted job comes with its submission.

    Returns:
        The folder of this session's logs on this host, if it has one: Ray's client has none.

    Raises:
        NoCluster: naming the address, within seconds when nothing listens there.
        Interrupted: for a signal that came meanwhile.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        _check_listening(address)
    # Ray prints the output of actors; a coloured prefix would be made harmless with the rest.
    os.environ["RAY_COLOR_PREFIX"] = "0"
    before = psutil.Process().children()
    try:
        context = _init(namespace, metadata, before)
    except (ConnectionError, AuthenticationError) as error:
        raise NoCluster(f"cannot join the Ray cluster at RAY_ADDRESS={address}: {error}") from error
    except SystemExit as error:
        # During its start Ray answers SIGTERM itself, by SystemExit.
        if not address:
            _end_children(before)
        raise Interrupted(signal.SIGTERM) from error
    finally:
        stop.install()
    stop.check()
    if isinstance(context, ClientContext):
        return []
    return [pathlib.Path(context.address_info["session_dir"], "logs")]


def _init(
    namespace: str,
    metadata: Mapping[str, str] | None,
    before: Collection[psutil.Process],
    starts: int = STARTS,
) -> Any:
    """Calls Ray, whose declared class is not the one it returns; again where it timed out.

    Args:
        before: children of this process that are not Ray's.
        starts: a local cluster has 30 s to start, which a busy machine may need more than once.
    """
    try:
        return ray.init(
            namespace=namespace,
            log_to_driver=True,
            include_dashboard=False,
            logging_level=logging.ERROR,
            job_config=JobConfig(metadata=dict(metadata or {})),
        )
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        _end_children(before)
        if starts == 1:
            raise NoCluster(
                f"Ray did not start on this host in 30 s, {STARTS} times: free processors or "
                "memory of it (`uptime`, `free -g`), and start the run again"
            ) from error
    return _init(namespace, metadata, before, starts - 1)


def cluster_hosts() -> list[dict[str, Any]]:
    """The hosts that have been in the cluster: name, address, whether each is alive, and what Ray
    says of its end.
    """
    return [
        {
            "host": node["NodeManagerHostname"],
            "address": node["NodeManagerAddress"],
            "alive": node["Alive"],
            "end": str(node.get("DeathReasonMessage") or ""),
        }
        for node in ray.nodes()
    ]


def _end_children(but: Collection[psutil.Process]) -> None:
    """Ends a cluster that was interrupted, or has timed out, as it started.

    Ray would end the parents alone, and their agents notice that only much later. Parents come
    first here too, so that none of them starts anything meanwhile.

    Args:
        but: children that stay, with theirs.
    """
    children = []
    for child in psutil.Process().children():
        if child not in but:
            with contextlib.suppress(psutil.NoSuchProcess):
                children += [child, *child.children(recursive=True)]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)


def _check_listening(address: str) -> None:
    """Dials the address once: Ray itself would try for minutes without a message."""
    if address.startswith("http"):
        raise NoCluster(
            f"RAY_ADDRESS={address} is the address of the job server: submit with `ray job submit "
            "-- python -m driver`, or give the driver the head's own address, such as HEAD:6379"
        )
    place = address.rpartition("://")[2]
    if ":" not in place:
        return  # `auto`, `local`: for Ray to resolve
    try:
        target = split_address(place)
    except ValueError as error:
        raise NoCluster(f"RAY_ADDRESS={address}: {error}") from error
    try:
        socket.create_connection(target, DIAL_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that can be no host's
        raise NoCluster(
            f"nothing answers at RAY_ADDRESS={address} ({error}): start the cluster, correct the "
            "address, or unset RAY_ADDRESS to run on this machine alone"
        ) from error


def bundle(resources: Resources) -> dict[str, float]:
    """What one actor asks for, in Ray's names."""
    asked = {"CPU": resources.cpus, "GPU": resources.gpus, "TPU": resources.tpus}
    return {name: amount for name, amount in asked.items() if amount > 0} or {"CPU": 0.001}


def reserve(config: PlacementConfig, workers: int, stop: StopSignal) -> PlacementGroup:
    """Reserves room for the learner (bundle 0) and the initial workers (bundles 1..), which need
    none where they share the learner's process.

    Raises:
        ResourcesNotMet: after `resources_timeout_s`, with what was asked and what is there; or if
            the room lies on several hosts, which cannot reach a learner on loopback.
    """
    apart = config.mode == "separate"
    bundles = [bundle(config.learner)] + [bundle(config.rollout)] * (workers if apart else 0)
    others = f" and {counted(workers, 'rollout worker')} ({_say(bundle(config.rollout))} each)"
    group = placement_group(bundles, strategy="PACK")
    deadline = time.monotonic() + config.resources_timeout_s
    while not group.wait(timeout_seconds=1):
        stop.check()
        if time.monotonic() > deadline or _is_hopeless(bundles):
            text = shortage(
                f"the learner ({_say(bundles[0])})" + (others if apart else ""),
                bundles,
                config.resources_timeout_s,
            )
            release(group)
            raise ResourcesNotMet(
                f"{text}\nlower placement.learner, placement.rollout or rollout.workers, or add "
                "nodes"
            )
    _check_hosts(config, [group])
    return group


class WorkerRoom:
    """Room for one worker that is added to a run, asked for without waiting.

    The placement group has one bundle, number 0. It takes nothing from the run while the cluster
    has no room for it.
    """

    def __init__(self, config: PlacementConfig, name: str, beside: PlacementGroup):
        """Asks the cluster.

        Args:
            config: of the run.
            name: of the worker, for messages.
            beside: where the learner is, which the worker must reach.
        """
        self._config = config
        self._name = name
        self._beside = beside
        self._bundle = bundle(config.rollout)
        self._deadline = time.monotonic() + config.resources_timeout_s
        self.group = placement_group([self._bundle], strategy="PACK")

    def is_there(self) -> bool:
        """Whether the worker can be started; never waits.

        Raises:
            ResourcesNotMet: as `reserve` does; the request is taken back then.
        """
        if placement_group_table(self.group)["state"] == "CREATED":
            try:
                _check_hosts(self._config, [self._beside, self.group])
            except ResourcesNotMet:
                release(self.group)
                raise
            return True
        if time.monotonic() > self._deadline or _is_hopeless([self._bundle]):
            text = self.shortage()
            release(self.group)
            raise ResourcesNotMet(
                f"{text}\nlower placement.rollout, ask for fewer workers, or add nodes"
            )
        return False

    def waiting(self) -> str:
        """What is waited for, and what is there."""
        return (
            f"waiting for room for {self._name} ({_say(self._bundle)}), for at most "
            f"{self._config.resources_timeout_s:g} s:\n{_room([self._bundle])}"
        )

    def shortage(self) -> str:
        """What was asked and what is there."""
        return shortage(
            f"{self._name} ({_say(self._bundle)})",
            [self._bundle],
            self._config.resources_timeout_s,
        )


def release(group: PlacementGroup) -> None:
    """Gives room back, or takes a request for it back; actors that live there are killed."""
    remove_placement_group(group)


def shortage(who: str, bundles: list[dict[str, float]], timeout_s: float) -> str:
    """Says that the cluster cannot fit a request, with each resource that was asked for."""
    return f"the Ray cluster cannot fit {who} within {timeout_s:g} s:\n{_room(bundles)}"


def _room(bundles: list[dict[str, float]]) -> str:
    """What was asked for and what the cluster has, a line for each resource."""
    there, free = ray.cluster_resources(), ray.available_resources()
    return "\n".join(
        f"  {name}: asked {amount:g}, cluster has {there.get(name, 0):g}, "
        f"free {free.get(name, 0):g}"
        for name, amount in _totals(bundles).items()
    )


def _is_hopeless(bundles: list[dict[str, float]]) -> bool:
    """Whether more is asked than the cluster has, used or not, and it will not grow."""
    there = ray.cluster_resources()
    lacking = [
        name for name, amount in _totals(bundles).items() if amount > there.get(name, 0) + 1e-9
    ]
    return bool(lacking) and not _may_grow()


def _check_hosts(config: PlacementConfig, groups: list[PlacementGroup]) -> None:
    """Checks that all processes can reach the learner, once all groups have their room."""
    tables = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
    nodes = {node for table in tables for node in table.values()}
    if len(nodes) > 1 and is_loopback(config.bind_host):
        raise ResourcesNotMet(
            f"learner and workers were placed on {len(nodes)} hosts, but placement.bind_host="
            f"{config.bind_host} is reached from one only: set placement.bind_host=0.0.0.0"
        )


def _totals(bundles: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for one in bundles for name in one})
    return {name: sum(one.get(name, 0.0) for one in bundles) for name in names}


def _say(asked: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in asked.items())


def _may_grow() -> bool:
    """Whether waiting can help: an autoscaler only runs on a cluster that we joined."""
    return joins_cluster(os.environ)
