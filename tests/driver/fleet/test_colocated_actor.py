"""Both roles in this process, on eight devices: the learner cuts its matrices over them, the worker
has all of each on every one."""

import types
from typing import Any

import pytest

from driver.config.sections.placement import PlacementConfig
from driver.fleet.colocated import ColocatedActor
from driver.fleet.launch import Launcher
from learner.actor import LearnerActor
from rollout_worker.actor import RolloutActor
from rollout_worker.worker_records import LeaseOutcome
from services.wire.tls import RunAuthority
from tests.rollout_worker.test_actor import learner_spec, leases, outcomes, rollout, worker_spec
from tests.tiny_model import write_tiny_model


class Remote:
    """A method of a Ray handle that runs at once, in this thread; the result is its reference."""

    def __init__(self, method):
        self.remote = method


class Process:
    """A Ray handle of a plain object."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, method):
        return Remote(getattr(self._actor, method))


def test_the_worker_is_called_in_the_learners_process_and_only_the_learner_ends_it(monkeypatch):
    actor = ColocatedActor.__new__(ColocatedActor)
    actor._worker, process = None, Process(actor)
    launcher = Launcher(PlacementConfig(mode="colocated"))
    monkeypatch.setattr(launcher, "_start", lambda *_: process)
    monkeypatch.setattr(ColocatedActor, "start_worker", lambda self, spec: spec.name)
    spec: Any = types.SimpleNamespace(name="rollout-0")
    room: Any = None
    learner = launcher.start_learner(spec, room)
    worker, ready = launcher.start_worker(spec, room)
    assert (ready.ref, ready.who) == ("rollout-0", "rollout-0")
    with pytest.raises(RuntimeError, match="the worker of this process has not started"):
        worker.news(1.0)
    monkeypatch.setattr(RolloutActor, "news", lambda self, wait_s: (self, wait_s))
    actor._worker = RolloutActor.__new__(RolloutActor)
    assert worker.news(1.0).ref == (actor._worker, 1.0)

    def reports(self, group_ids):
        return self, group_ids

    monkeypatch.setattr(LearnerActor, "reports", reports)
    call = learner.reports(["g0"])
    assert (call.ref, call.who, call.method) == ((actor, ["g0"]), "the learner", "reports")

    killed = []
    monkeypatch.setattr("driver.fleet.launch.ray.kill", killed.append)
    worker.kill()
    assert killed == []
    learner.kill()
    assert killed == [process]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_versions_go_from_learner_to_worker_on_the_devices_and_their_digests_hold(tmp_path, dtype):
    model, authority = write_tiny_model(tmp_path / "tiny"), RunAuthority.create("run")
    actor = ColocatedActor(learner_spec(model, authority, tmp_path, weights_dtype=dtype))
    learner, address = actor, actor.describe().address
    info = actor.start_worker(worker_spec(model, authority, address, weights_dtype=dtype))
    worker = actor._worker
    assert worker is not None and (info.address, info.pid) == ("", learner.describe().pid)
    learner.publish()
    for version in range(2):
        ended = rollout(worker, leases(2 * version, 2 * version + 1, version=version))
        assert outcomes(ended) == {LeaseOutcome.ACCEPTED}
        assert {result.report.policy_version for result in ended.values()} == {version}
        news, issued = worker.news(0.0), learner.digest(version, 20.0)
        assert (news.policy_version, news.weight_digest) == (version, issued)
        report = learner.update(sorted(ended), [], 20.0)
        assert set(report.outcomes.values()) == {"trained"}
        assert news.canary_gap < (1e-4 if dtype == "float32" else 0.5)
    for role in (worker, learner):
        assert sum(role.take_timing().seconds.values()) > 0
        role.close()
