"""A learner behind its server: what workers and the driver see of it."""

import dataclasses
import socket
import threading
import types
from typing import Any

import jax
import numpy as np
import pytest

from learner.actor import LearnerActor, serve
from services.trajectories.client import TrajectoryClient, pack_group
from services.wire.server import PortUnavailable
from services.wire.tls import RunAuthority
from tests.learner.tiny_learner import WAIT_S, groups_of, learner_spec, names, push
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def authority():
    return RunAuthority.create("run")


@pytest.fixture
def learner(authority, tmp_path, monkeypatch):
    monkeypatch.setattr("learner.actor.require_platform", lambda _: jax.devices()[:1])
    model = write_tiny_model(tmp_path / "tiny")
    actor = LearnerActor(learner_spec(model, authority, tmp_path / "run"))
    actor.publish()
    yield actor
    actor.close()


def test_a_full_disk_shows_in_health_and_in_what_a_worker_is_answered(
    learner, authority, monkeypatch
):
    (group, _) = groups_of(learner._learner, 1)

    def disk_full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("learner.durable.spool.os.fdatasync", disk_full)
    client = TrajectoryClient(learner.describe().address, authority.issue("rollout-0"))
    with pytest.raises(TimeoutError, match="waited 0.5 s .*'g1-0'.*No space left"):
        client.push_group(pack_group(group), 0.5)
    client.close()
    assert "No space left" in learner.health().problem
    assert learner.health().counts.accepted == 0


def test_a_learner_has_a_lease_that_each_question_of_the_driver_renews_F03(
    authority, tmp_path, monkeypatch
):
    calls: list[Any] = []

    class Lease:
        def __init__(self, *given):
            calls.append(given)

        def start(self):
            calls.append("starts")

        def renew(self):
            calls.append("renewed")

    monkeypatch.setattr("learner.actor.DriverLease", Lease)
    monkeypatch.setattr("learner.actor.require_platform", lambda _: jax.devices()[:1])
    model = write_tiny_model(tmp_path / "tiny")
    spec = learner_spec(model, authority, tmp_path / "run", driver_lease_s=77.0)
    actor = LearnerActor(spec)
    assert calls == [("the learner", 77.0), "starts"]
    actor.health()
    assert calls[2:] == ["renewed"]
    actor.close()


def test_a_token_that_the_model_does_not_have_is_refused_at_the_door_R11(learner):
    (group, _) = groups_of(learner._learner, 1)
    first, *others = group.completions
    first = dataclasses.replace(first, token_ids=np.full_like(first.token_ids, 10**6))
    group = dataclasses.replace(group, completions=(first, *others))
    with pytest.raises(ValueError, match="below the vocabulary's .*, got 1000000"):
        push(learner._learner, [group])
    assert learner.health().counts.accepted == 0


def test_health_says_what_the_learner_is_at_and_how_far_it_has_come_R8(learner):
    before = learner.health().activity
    assert before.doing == "idle"
    with learner._clock.phase("optimizer"):
        assert learner.health().activity.doing == "optimizer"
    push(learner._learner, groups_of(learner._learner, 1))
    learner.update(names(1), [], WAIT_S)
    done = learner.health().activity.counters
    assert done["programs"] > before.counters["programs"]
    assert done["versions"] == before.counters["versions"] + 1


def test_questions_are_answered_while_an_update_waits(learner):
    thread = threading.Thread(target=lambda: learner.update(names(1), [], WAIT_S))
    thread.start()
    while learner.health().doing != "update":
        assert thread.is_alive()
    assert learner.take_timing() and learner.reports() == []
    assert learner.health().counts.waiting == 0
    push(learner._learner, groups_of(learner._learner, 1))
    thread.join(WAIT_S)
    assert learner.health().policy_version == 1


@pytest.mark.parametrize("taken", [False, True])
def test_the_port_of_the_learner_before_is_taken_if_it_is_free_F11(authority, taken):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        earlier = other.getsockname()[1]
        if not taken:
            other.close()
        spec: Any = types.SimpleNamespace(
            credentials=authority.issue("learner"),
            bind_host="127.0.0.1",
            port=0,
            earlier_port=earlier,
        )
        with serve(spec, []) as server:
            assert (server.port != earlier) is taken


def test_a_configured_port_that_is_taken_is_an_error_F11(authority):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        spec: Any = types.SimpleNamespace(
            credentials=authority.issue("learner"),
            bind_host="127.0.0.1",
            port=port,
            earlier_port=port,
        )
        with pytest.raises(PortUnavailable, match=f"port {port}"):
            serve(spec, [])
