"""What `placement.mode: colocated` allows, and what it comes to."""

import types

import pytest
from pydantic import ValidationError

from driver.config.plan import Devices, asked_devices, derive, format_plan
from driver.config.sections.placement import Resources
from driver.fleet.cluster import bundle, reserve
from tests.driver.config.test_plan import TINY, config_of


def colocated(**sections):
    placement = {"mode": "colocated", **sections.pop("placement", {})}
    rollout = {"workers": 1, **sections.pop("rollout", {})}
    return config_of(placement=placement, rollout=rollout, **sections)


@pytest.mark.parametrize(
    "sections, part",
    [
        ({"rollout": {"workers": 2}}, r"set rollout.workers=1 \(it starts with 2, policy fixed\)"),
        ({"rollout": {"workers": {"min": 1, "max": 4, "policy": "balance"}}}, "policy balance"),
        ({"rollout": {"decode": {"slots": 32, "tensor": 2}}}, "decode.tensor=2 must be 1"),
        ({"placement": {"rollout": {"cpus": 4}}}, "placement.rollout must not be set"),
    ],
)
def test_what_one_process_cannot_be_is_refused_with_its_rule(sections, part):
    with pytest.raises(ValidationError, match=part) as refused:
        colocated(**sections)
    assert "placement.mode" in str(refused.value)


def test_both_roles_see_the_devices_that_the_learner_asks_for():
    placement = {"platform": "tpu", "learner": {"tpus": 4}}
    assert asked_devices(colocated(placement=placement)) == Devices(
        learner=4, worker=4, shared=True
    )


def test_the_plan_adds_up_what_lies_on_a_device():
    config = colocated(rollout={"max_staleness": 1})
    plan = derive(config, TINY, asked_devices(config))
    worker = plan.worker
    assert plan.shared_bytes_per_device == (
        plan.learner_bytes_per_device
        + 2 * worker.policy_bytes
        + worker.cache_bytes
        + worker.pool_bytes
    )
    text = format_plan(plan)
    assert "learner and worker share 1 device of one process, together" in text
    assert "the 3.02 kB of a policy version stay there" in text
    assert "wire:" not in text
    assert any("take turns on the same devices" in note for note in plan.notes)
    apart = config_of()
    assert derive(apart, TINY, asked_devices(apart)).shared_bytes_per_device is None


def test_the_room_of_a_run_is_that_of_one_process(monkeypatch):
    asked = []

    def group(bundles, strategy):
        asked.append(bundles)
        return types.SimpleNamespace(wait=lambda timeout_seconds: True)

    monkeypatch.setattr("driver.fleet.cluster.placement_group", group)
    monkeypatch.setattr("driver.fleet.cluster._check_hosts", lambda config, groups: None)
    stop = types.SimpleNamespace(check=lambda: None)
    for mode in ("colocated", "separate"):
        placement = colocated(placement={"learner": {"cpus": 3}}).placement
        reserve(placement.model_copy(update={"mode": mode}), 1, stop)
    learner, worker = bundle(Resources(cpus=3)), bundle(Resources())
    assert asked == [[learner], [learner, worker]]
