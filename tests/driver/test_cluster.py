"""Joining a cluster, as far as it can be told without one."""

import socket
import time

import pytest

from driver.cluster import BadAddress, NoCluster, check_bind_host, connect
from driver.signals import StopSignal


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_not_there_is_named_within_seconds(monkeypatch, scheme):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    started = time.monotonic()
    with pytest.raises(NoCluster, match=f"nobody answers at RAY_ADDRESS={address}"):
        connect("test", StopSignal())
    assert time.monotonic() - started < 10


def test_the_job_server_is_told_from_the_head(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    monkeypatch.delenv("RAY_JOB_ID", raising=False)
    with pytest.raises(NoCluster, match="is the address of the job server"):
        connect("test", StopSignal())


@pytest.mark.parametrize("host", ["", "999.1.1.1", "no-such-host.invalid"])
def test_what_is_no_address_is_refused_before_anything_starts(host):
    with pytest.raises(BadAddress, match="placement.bind_host="):
        check_bind_host(host)
    check_bind_host("0.0.0.0")
