"""What is proposed where a run does not fit, by arithmetic on programs of sizes made by hand."""

import importlib.util

import pytest

from driver.chip_plan.advice import nearest_that_fits, other_settings
from driver.chip_plan.chips import LIBTPU_ENVIRONMENT
from driver.chip_plan.learner_programs import OF_MICROBATCHES
from driver.chip_plan.run_program import RunProgram, added
from driver.chip_plan.run_shape import PlanRequest
from driver.chip_plan.search import LargestSearch
from driver.chip_plan.topology import parse_topology

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)
SEPARATE = (
    *("placement.mode=separate", "placement.learner.tpus=4", "placement.rollout.tpus=4"),
    "learner.mesh.fsdp=4",
)
GIB = 2**30


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    for variable, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)


def run_on(topology, *overrides, usable_gib=1000.0, path=None):
    """One layer of the reference run's model, or of the demo's on the CPU."""
    of_cpu = topology == "cpu"
    request = PlanRequest(
        path=f"deploy/runs/{'demo_cpu' if of_cpu else 'gsm8k_qwen25_3b_v6e8'}.yaml",
        overrides=overrides,
        topology=parse_topology(topology, usable_gib),
        layers=1,
    )
    return request, request.shape()


def compiled(shape, role, **temporaries):
    """The programs of a role, as if the compiler had found these temporaries."""
    return [
        RunProgram(
            role=role,
            name=one.name,
            peak_bytes=sum(one.inside.values()) + temporaries.get(one.name, 0),
            inside=one.inside,
            beside=added(one.beside, shape.others(role)),
        )
        for one in shape.planned(role)
    ]


def proposed(request, shape, role, **temporaries):
    """Overrides and topology of every proposal."""
    lines = other_settings(request, shape, compiled(shape, role, **temporaries))
    found = []
    for line in lines:
        settings, _, _ = line.partition(", with ")
        settings, _, topology = settings.partition(" --topology ")
        found.append((tuple(settings.removeprefix("--set ").split(" --set ")), topology))
    return found


@needs_compiler
def test_all_that_makes_a_learner_smaller_is_considered():
    request, shape = run_on("v6e:2x4", *SEPARATE)
    assert proposed(request, shape, "learner") == [
        (("learner.optimizer.moments_dtype=bfloat16",), ""),
        (("learner.optimizer.offload=true",), ""),
        (("learner.lora.rank=16",), ""),
        (("learner.mesh.context=2", "learner.mesh.fsdp=2"), ""),
        (("learner.mesh.context=4", "learner.mesh.fsdp=1"), ""),
        (("placement.learner.tpus=8", "learner.mesh.fsdp=8"), "v6e:4x4"),
        (("placement.learner.tpus=16", "learner.mesh.fsdp=16"), "v6e:4x8"),
    ]
    assert proposed(request, shape, "worker") == [
        (("rollout.decode.tensor=2",), ""),
        (("rollout.decode.tensor=4",), ""),
    ]


@needs_compiler
@pytest.mark.parametrize(
    "mesh, chips_of_one_part",
    [
        (("learner.mesh.data=-1", "learner.mesh.fsdp=2"), 2),
        (("learner.mesh.data=2", "learner.mesh.fsdp=2"), 2),
        (("learner.mesh.context=2", "learner.mesh.fsdp=2"), 2),
        (("learner.mesh.context=4", "learner.mesh.fsdp=1"), 4),
        (("learner.mesh.data=1", "learner.mesh.fsdp=-1"), 1),
    ],
)
def test_more_chips_are_proposed_with_a_mesh_that_has_them(mesh, chips_of_one_part):
    request, shape = run_on("v6e:2x4", *SEPARATE, *mesh)
    larger = [each for each in proposed(request, shape, "learner") if each[1]]
    assert [topology for _, topology in larger] == ["v6e:4x4", "v6e:4x8"]
    for chips, (settings, topology) in zip((8, 16), larger, strict=True):
        fsdp = chips // chips_of_one_part
        assert settings == (f"placement.learner.tpus={chips}", f"learner.mesh.fsdp={fsdp}")
        _, changed = run_on(topology, *SEPARATE, *mesh, *settings)
        assert changed.plan.mesh.shards * changed.plan.mesh.data == chips


@needs_compiler
def test_every_worker_counts_among_the_chips_that_are_proposed():
    request, shape = run_on("v6e:4x4", *SEPARATE, "rollout.workers=3")
    larger = [settings for settings, topology in proposed(request, shape, "learner") if topology]
    assert larger == [  # 8 and 16 chips beside 3 x 4 in one of 32
        ("placement.learner.tpus=8", "learner.mesh.fsdp=8"),
        ("placement.learner.tpus=16", "learner.mesh.fsdp=16"),
    ]
    request, shape = run_on("v6e:4x4", *SEPARATE)
    on_these = [settings for settings, topology in proposed(request, shape, "learner")]
    assert ("placement.learner.tpus=8", "learner.mesh.fsdp=8") in on_these
    assert [each for each in proposed(request, shape, "learner") if each[1]] == [
        (("placement.learner.tpus=16", "learner.mesh.fsdp=16"), "v6e:4x8")
    ]


@needs_compiler
def test_a_larger_topology_has_no_more_memory_than_was_given():
    temporaries = 4 * GIB  # they stay, however many chips there are
    for usable_gib, fits in ((3.0, False), (8.0, True)):
        request, shape = run_on("v6e:2x4", *SEPARATE, usable_gib=usable_gib)
        found = proposed(request, shape, "learner", apply=temporaries)
        assert any(topology for _, topology in found) == fits


@needs_compiler
def test_a_micro_batch_of_one_row_shrinks_the_temporaries_of_its_programs_alone():
    request, shape = run_on("v6e:2x4", *SEPARATE, usable_gib=6.0)
    # 8192 tokens at present; a row has 1536, or its part on each of the chips that share it.
    found = [settings for settings, _ in proposed(request, shape, "learner", accumulate=16 * GIB)]
    moments = "learner.optimizer.moments_dtype=bfloat16"
    assert (moments, "learner.microbatch_tokens=1536") in found
    context = ("learner.mesh.context=2", "learner.mesh.fsdp=2", "learner.microbatch_tokens=768")
    assert context in found
    assert proposed(request, shape, "learner", accumulate=16 * GIB, apply=16 * GIB) == []
    assert "accumulate" in OF_MICROBATCHES and "apply" not in OF_MICROBATCHES


def test_on_the_cpu_neither_chips_nor_its_own_memory_are_proposed():
    request, shape = run_on("cpu")
    assert proposed(request, shape, "learner") == [
        (("learner.optimizer.moments_dtype=bfloat16",), ""),
        (("learner.lora.rank=16",), ""),
    ]
    assert proposed(request, shape, "worker") == []


def test_where_nothing_would_fit_it_is_said():
    request, shape = run_on("cpu", usable_gib=0.001)
    own = compiled(shape, "worker")
    why, nothing = nearest_that_fits(request, shape, own, LargestSearch(request))
    assert why.startswith("rollout.decode.slots: no value fits, what does not depend on it needs")
    assert nothing.startswith("none of the settings that were considered makes it fit")
