"""What the learner's programs take, before any of them is compiled."""

import importlib.util

import pytest

from driver.chip_plan.chips import LIBTPU_ENVIRONMENT
from driver.chip_plan.learner_programs import HOST_MOMENTS, MOMENTS, PARAMETERS
from driver.chip_plan.run_shape import PlanRequest
from driver.chip_plan.topology import parse_topology

OFFLOAD = "learner.optimizer.offload=true"


def shape_of(*overrides, path="deploy/runs/demo_cpu.yaml", topology="cpu"):
    return PlanRequest(
        path=path, overrides=overrides, topology=parse_topology(topology), layers=1
    ).shape()


def planned(shape, role="learner"):
    return {one.name: one for one in shape.planned(role)}


@pytest.mark.parametrize(
    "tokens, longest, shorter",
    [
        (240, "1x128", "3x64"),  # 192 of 240 slots in place of 128
        (256, "2x128", None),
        (300, "2x128", None),  # 256 slots with both
        (120, "1x120", None),
    ],
)
def test_the_row_length_with_the_most_slots_is_planned_beside_the_longest(tokens, longest, shorter):
    """Sequences of 79 tokens, in rows of 128 or of the whole budget."""
    programs = planned(shape_of(f"learner.microbatch_tokens={tokens}"))
    assert f"tensor<{longest}xi32>" in programs["accumulate"].lower().as_text()
    assert ("accumulate, shorter rows" in programs) == (shorter is not None)
    if shorter is not None:
        assert f"tensor<{shorter}xi32>" in programs["accumulate, shorter rows"].lower().as_text()


def test_scores_before_an_update_have_both_row_lengths_too():
    critic = ("algorithm.advantage=gae", "learner.microbatch_tokens=240")
    assert {"score of the critic", "score of the critic, shorter rows"} <= set(
        planned(shape_of(*critic))
    )


def test_moments_in_the_memory_of_the_host_count_on_the_cpu_which_has_no_other():
    plain, moved = shape_of(), shape_of(OFFLOAD)
    matrices = plain.learner.resident[MOMENTS] - moved.learner.resident[MOMENTS]
    assert moved.learner.resident[HOST_MOMENTS] == matrices > 0
    for name, program in planned(moved).items():
        assert program.beside[HOST_MOMENTS] == matrices, name
    whole = plain.learner.resident[MOMENTS]
    assert planned(moved)["apply"].inside[MOMENTS] == whole  # they are moved there
    assert planned(moved, "worker") and moved.others("worker")[HOST_MOMENTS] == matrices
    assert HOST_MOMENTS not in plain.learner.resident
    assert moved.state_bytes == plain.state_bytes
    assert moved.offloaded_bytes == 0, "others() has them"


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)
@pytest.mark.parametrize("data, fsdp", [(1, 8), (2, 4), (8, 1)])
def test_every_chip_keeps_its_moments_in_the_memory_of_the_host(monkeypatch, data, fsdp):
    for variable, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    shape = shape_of(
        *(OFFLOAD, f"learner.mesh.data={data}", f"learner.mesh.fsdp={fsdp}"),
        path="deploy/runs/gsm8k_qwen25_3b_v6e8.yaml",
        topology="v6e:2x4",
    )
    resident = shape.learner.resident
    assert HOST_MOMENTS not in resident
    assert shape.offloaded_bytes == 8 * shape.learner.offloaded_bytes
    # Two float32 moments of each parameter, on every chip those of its part.
    assert resident[MOMENTS] + shape.learner.offloaded_bytes == pytest.approx(
        2 * resident[PARAMETERS], abs=8
    )
    # A checkpoint has the state once, however many chips have copies of it.
    assert shape.state_bytes == fsdp * (
        resident[PARAMETERS] + resident[MOMENTS] + shape.learner.offloaded_bytes
    )


def test_a_program_beside_another_shape_has_the_arrays_of_that():
    (snapshot,) = shape_of("rollout.decode.slots=8").compile_programs(
        ("learner",), frozenset({"snapshot"})
    )
    moved = shape_of("rollout.decode.slots=16").beside(snapshot)
    # Two workers, and a slot of each takes what it took.
    assert moved.beside["KV cache"] == pytest.approx(2 * snapshot.beside["KV cache"], rel=0.01)
    assert moved.peak_bytes == snapshot.peak_bytes
