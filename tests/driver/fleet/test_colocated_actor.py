"""Both roles in this process, on eight devices: the learner cuts its matrices over them, the worker
has all of each on every one."""

import pytest

from driver.fleet.colocated import ColocatedActor, Part, Role
from rollout_worker.lease_records import LeaseOutcome
from services.wire.tls import RunAuthority
from tests.rollout_worker.test_actor import learner_spec, leases, outcomes, rollout, worker_spec
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


class Process:
    """A handle whose calls run at once, in this thread."""

    def __init__(self, actor):
        self.call = type("Call", (), {"remote": staticmethod(actor.call)})


class Now:
    """A part whose methods are called as a plain object's."""

    def __init__(self, part):
        self._part = part

    def __getattr__(self, method):
        return getattr(self._part, method).remote


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_versions_go_from_learner_to_worker_on_the_devices_and_their_digests_hold(tmp_path, dtype):
    model, authority = write_tiny_model(tmp_path / "tiny"), RunAuthority.create("run")
    actor = ColocatedActor(learner_spec(model, authority, tmp_path, weights_dtype=dtype))
    process = Process(actor)
    learner, worker = (Now(Part(process, role)) for role in (Role.LEARNER, Role.WORKER))
    address = learner.describe()["address"]
    about = actor.start_worker(worker_spec(model, authority, address, weights_dtype=dtype))
    assert (about["address"], about["pid"]) == ("", learner.describe()["pid"])
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
    for part in (worker, learner):
        assert sum(part.take_timing().seconds.values()) > 0
        part.close()
