"""The fingerprint of a plan: what changes it, and what does not."""

from driver.chip_plan.fingerprint import fingerprint
from driver.chip_plan.run_shape import PlanRequest
from driver.chip_plan.topology import parse_topology


def of(*overrides, usable_gib=1.0):
    request = PlanRequest(
        path="deploy/runs/demo_cpu.yaml",
        overrides=("learner.microbatch_tokens=256", *overrides),
        topology=parse_topology("cpu", usable_gib),
    )
    return fingerprint(request, request.shape())


def test_only_what_memory_and_programs_depend_on_changes_it():
    plain = of()
    assert plain == of("run.name=other", "checkpoint.every_steps=7")
    others = [
        of("learner.optimizer.name=lion"),  # another program
        of("rollout.decode.slots=32"),  # other sizes
        of(usable_gib=2.0),  # another chip
    ]
    assert len({plain, *others}) == 4
