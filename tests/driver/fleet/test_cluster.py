"""Joining a cluster, and asking it for room."""

import contextlib
import pathlib
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import types
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from driver.config.sections.placement import PlacementConfig, Resources
from driver.fleet.cluster import (
    JOB_VARIABLE,
    BadAddress,
    NoCluster,
    OpenNetwork,
    ResourcesNotMet,
    WorkerRoom,
    check_bind_host,
    check_network,
    connect,
    release,
    reserve,
    stop_notice,
)
from driver.fleet.launch import CHILDREN_END_THEMSELVES
from driver.signals import StopSignal
from tests.deadlines import HANG_S, wait_until
from tests.ipv6 import needs_ipv6


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_not_there_is_named_before_ray_asks_it(monkeypatch, scheme):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", None)  # it would ask for minutes
    with pytest.raises(NoCluster, match=f"nothing answers at RAY_ADDRESS={address}"):
        connect("test", StopSignal())


def test_the_address_of_the_job_server_is_not_taken_for_the_head(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(NoCluster, match="is the address of the job server"):
        connect("test", StopSignal())


@needs_ipv6
def test_a_cluster_that_is_not_there_is_named_over_ipv6(monkeypatch):
    with socket.socket(socket.AF_INET6) as unused:
        unused.bind(("::1", 0))
        address = f"[::1]:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", None)
    with pytest.raises(NoCluster, match=re.escape(f"nothing answers at RAY_ADDRESS={address}")):
        connect("test", StopSignal())


@pytest.mark.parametrize("name", ["a..b", 64 * "a"])
def test_a_cluster_whose_name_no_host_can_have_is_named(monkeypatch, name):
    monkeypatch.setenv("RAY_ADDRESS", f"{name}:6379")
    monkeypatch.setattr(ray, "init", None)
    with pytest.raises(NoCluster, match=f"nothing answers at RAY_ADDRESS={name}:6379"):
        connect("test", StopSignal())


@pytest.mark.parametrize("host", ["", "999.1.1.1", "no-such-host.invalid", "[::1]"])
def test_what_is_no_address_is_refused_before_anything_starts(host):
    with pytest.raises(BadAddress, match="placement.bind_host="):
        check_bind_host(host)
    check_bind_host("0.0.0.0")


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of two hosts, which are processes here: four CPUs, and a chip alone.

    Only one of them has room for a learner, wherever Ray has not yet given back that of a test."""
    with contextlib.ExitStack() as stack:
        # Ray notes the address of a Cluster in its folder, and every driver that starts meanwhile
        # would join it: those of the tests that run beside this one.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-ray-"))
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setenv("RAY_TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
        stack.callback(cluster.shutdown)
        cluster.add_node(num_cpus=0, num_gpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        stack.callback(ray.shutdown)
        yield


def placement(**changes):
    sizes = {"learner": Resources(cpus=1), "rollout": Resources(cpus=1.5)}
    return PlacementConfig(**sizes | {"resources_timeout_s": 2.0} | changes)


def wait_for(room):
    wait_until(room.is_there, "the room")


@pytest.fixture
def run_room(cluster):
    """Of a learner and one worker; 1.5 of 4 CPUs are left beside them."""
    group = reserve(placement(resources_timeout_s=HANG_S), 1, StopSignal())
    yield group
    release(group)


@pytest.mark.slow
@pytest.mark.service
def test_room_for_one_more_worker_is_asked_for_and_given_back(run_room):
    first = WorkerRoom(placement(resources_timeout_s=HANG_S), "rollout-1", run_room)
    wait_for(first)
    second = WorkerRoom(placement(), "rollout-2", run_room)
    patient = WorkerRoom(placement(resources_timeout_s=2 * HANG_S), "rollout-3", run_room)
    asked = time.monotonic()
    assert not patient.is_there(), "it never waits"
    assert time.monotonic() - asked < HANG_S
    release(patient.group)
    assert not second.is_there()
    assert second.waiting().startswith("waiting for room for rollout-2 (1.5 CPU), for at most 2 s")
    with pytest.raises(ResourcesNotMet) as refused:
        wait_for(second)
    message = str(refused.value)
    assert "cannot fit rollout-2 (1.5 CPU) within 2 s" in message
    assert "CPU: asked 1.5, cluster has 4, free 0" in message
    assert placement_group_table(second.group)["state"] == "REMOVED"
    third = WorkerRoom(placement(resources_timeout_s=HANG_S), "rollout-2", run_room)
    assert not third.is_there()
    release(first.group)  # a drained worker leaves its room to the next
    wait_for(third)
    release(third.group)


@pytest.mark.slow
@pytest.mark.service
def test_what_the_cluster_lacks_is_refused_with_asked_and_there(cluster):
    chips = {"learner": Resources(cpus=1, tpus=1), "rollout": Resources(cpus=1.5, tpus=1)}
    with pytest.raises(ResourcesNotMet) as refused:
        reserve(placement(**chips, platform="tpu"), 2, StopSignal())
    message = str(refused.value)
    assert refused.value.exit_code == 3
    assert "TPU: asked 3, cluster has 0, free 0" in message
    assert "CPU: asked 4, cluster has 4, free" in message


@pytest.mark.slow
@pytest.mark.service
def test_a_worker_on_another_host_cannot_reach_a_learner_on_loopback(run_room):
    elsewhere = {"rollout": Resources(cpus=0, gpus=1), "resources_timeout_s": HANG_S}
    room = WorkerRoom(placement(**elsewhere), "rollout-1", run_room)
    with pytest.raises(ResourcesNotMet, match="placed on 2 hosts, but placement.bind_host=127"):
        wait_for(room)
    assert placement_group_table(room.group)["state"] == "REMOVED"
    room = WorkerRoom(placement(**elsewhere, bind_host="0.0.0.0"), "rollout-1", run_room)
    wait_for(room)
    release(room.group)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "node-7"])
def test_keys_do_not_travel_on_a_network_that_others_may_read_F06(host):
    open_network = placement(bind_host=host)
    joined = {"RAY_ADDRESS": "10.0.0.1:6379"}
    for environ in (joined, joined | {"RAY_USE_TLS": "0"}):
        with pytest.raises(OpenNetwork, match=f"placement.bind_host={host} .*private_network=true"):
            check_network(open_network, environ)
    check_network(open_network, joined | {"RAY_USE_TLS": "1"})
    check_network(placement(bind_host=host, private_network=True), joined)
    check_network(open_network, {})  # a local cluster, on loopback
    check_network(placement(bind_host="::1"), joined)


@pytest.mark.slow
@pytest.mark.service
def test_what_scorers_have_started_ends_with_a_worker_that_ray_kills_R15(cluster, tmp_path):
    seconds = secrets.randbelow(10**6) + 10**6
    (tmp_path / "stray.py").write_text(
        f"import subprocess\n"
        f"def act(completion, **_):\n"
        f"    subprocess.Popen(['setsid', 'sleep', '{seconds}'])\n"
        f"    return 1.0\n"
    )
    paths = [str(pathlib.Path(__file__).resolve().parents[3]), str(tmp_path)]

    class Actor:
        def score(self) -> float:
            sys.path[:0] = paths
            from rollout_worker.config.reward_config import RewardFunctionConfig
            from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest

            scorers = [RewardFunctionConfig(name="stray:act")]
            self.pool = RewardPool(scorers, processes=1, timeout_s=300.0)
            return self.pool.submit([ScoreRequest("x", "", "", {})]).wait()[0].total

    def strays() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found += [process] * (process.cmdline()[-2:] == ["sleep", str(seconds)])
        return found

    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": CHILDREN_END_THEMSELVES}}
    actor = ray.remote(Actor).options(max_concurrency=2, **options).remote()
    assert ray.get(actor.score.remote(), timeout=HANG_S) == 1.0
    assert strays()
    ray.kill(actor)
    wait_until(lambda: not strays(), "the end of what the scorer has started")


@pytest.mark.parametrize(
    "environ, said",
    [
        ({}, ""),
        ({JOB_VARIABLE: "{}", "RAY_JOB_STOP_WAIT_TIME_S": "600"}, ""),
        ({JOB_VARIABLE: "{}"}, "kills this job after 3 s"),
        ({JOB_VARIABLE: "{}", "RAY_JOB_STOP_WAIT_TIME_S": "5"}, "kills this job after 5 s"),
    ],
)
def test_a_job_that_is_killed_too_soon_to_save_is_told_so(environ, said):
    assert said in stop_notice(environ) and bool(stop_notice(environ)) == bool(said)


@pytest.mark.parametrize("timeouts", [0, 2, 3])
def test_a_local_cluster_that_a_busy_machine_starts_too_slowly_is_started_again(
    monkeypatch, timeouts
):
    """Ray gives its processes 30 s, raises a bare Exception, and leaves them behind."""
    tries, others = [], []

    def init(**settings):
        others.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]))
        tries.append(settings)
        if len(tries) <= timeouts:
            raise Exception("The current node timed out during startup. This could happen ...")
        return types.SimpleNamespace(address_info={"session_dir": "/session"})

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.init", init)
    stop: Any = types.SimpleNamespace(install=lambda: None, check=lambda: None)
    kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        if timeouts < 3:
            assert connect("one", stop) == [pathlib.Path("/session/logs")]
        else:
            with pytest.raises(NoCluster, match="did not start on this host in 30 s, 3 times"):
                connect("one", stop)
        ended = others[:timeouts]
        assert len(tries) == min(timeouts + 1, 3)
        assert not any(psutil.pid_exists(one.pid) for one in ended)
        assert kept.poll() is None, "what is not Ray's stays"
    finally:
        for one in [kept, *others]:
            one.kill()
            one.wait(HANG_S)
