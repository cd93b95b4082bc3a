"""What lies beside a worker's programs, before any of them is compiled."""

from driver.chip_plan.run_shape import PlanRequest
from driver.chip_plan.topology import parse_topology
from driver.chip_plan.worker_programs import KEPT_POLICY, NEXT_POLICY, POLICY

BESIDE_TRAINING = ("rollout.max_staleness=1", "eval.beside_training=true", "eval.every_steps=5")


def shape_of(*overrides):
    return PlanRequest(
        path="deploy/runs/demo_cpu.yaml",
        overrides=overrides,
        topology=parse_topology("cpu"),
        layers=1,
    ).shape()


def test_the_policy_that_an_evaluation_beside_training_keeps_counts_in_every_program():
    shape = shape_of(*BESIDE_TRAINING)
    assert shape.plan.keeps_policy
    version = shape.plan.worker.version_bytes
    assert shape.worker.resident[KEPT_POLICY] == version > 0
    for program in shape.planned("worker"):
        assert program.beside[KEPT_POLICY] == version, program.name
    assert shape.others("learner")[KEPT_POLICY] == 2 * version  # of two workers on one CPU


def test_without_such_an_evaluation_no_policy_is_kept():
    for overrides in ((), ("rollout.max_staleness=1", "eval.beside_training=false")):
        shape = shape_of(*overrides)
        assert KEPT_POLICY not in shape.worker.resident
        assert all(KEPT_POLICY not in one.beside for one in shape.planned("worker"))


def test_a_version_that_may_arrive_counts_while_a_worker_decodes():
    shape = shape_of()
    programs = {one.name: one for one in shape.planned("worker")}
    assert programs["segment"].beside[NEXT_POLICY] == shape.plan.worker.version_bytes
    assert NEXT_POLICY not in programs["empty"].beside
    assert NEXT_POLICY not in shape.worker.resident
    assert NEXT_POLICY in shape_of("rollout.max_staleness=1").worker.resident
    assert shape.worker.resident[POLICY] == shape.plan.worker.policy_bytes
