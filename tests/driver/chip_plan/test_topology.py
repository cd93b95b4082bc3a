"""Topologies and the runs that they take; nothing here needs a TPU's compiler."""

import re

import pytest

from driver.chip_plan import topology as topologies
from driver.chip_plan.topology import check_run_on, parse_topology, several_hosts
from driver.config.load_config import ConfigError, load
from driver.config.plan import Devices, asked_devices

REFERENCE = "deploy/runs/gsm8k_qwen25_3b_v6e8.yaml"


@pytest.mark.parametrize(
    "text, chips, usable_gib",
    [
        ("v6e:2x4", 8, 31.25),
        ("v6e:4x4", 16, 31.25),
        ("v5e:1x1", 1, 15.75),
        ("v5p:2x2x1", 4, 95.74),
    ],
)
def test_a_topology_has_chips_with_the_memory_of_their_kind(text, chips, usable_gib):
    found = parse_topology(text)
    assert (found.chips, found.platform) == (chips, "tpu")
    assert found.usable_bytes == round(usable_gib * 2**30)


def test_the_cpu_has_one_device_with_the_memory_of_this_machine():
    found = parse_topology("cpu")
    assert (found.chips, found.platform, found.kind) == (1, "cpu", None)
    assert found.usable_bytes > 2**30


def test_the_memory_that_programs_may_use_can_be_given():
    assert parse_topology("v6e:2x4", 2.5).usable_bytes == 5 * 2**29


@pytest.mark.parametrize(
    "text, parts",
    [
        ("v9x:2x4", ["v9x", "v6e, v5e, v5p", "v6e:2x4"]),
        ("v6e:3x3", ["'3x3' is no shape of v6e chips", "v6e:2x4"]),
        ("v5p:2x4", ["'2x4' is no shape of v5p chips", "v5p:2x2x2"]),
        ("v6e", ["'' is no shape of v6e chips", "v6e:4x4"]),
        ("gpu", ["there is no chip 'gpu'", "or cpu"]),
    ],
)
def test_an_unknown_topology_is_refused_with_those_that_there_are(text, parts):
    with pytest.raises(ConfigError) as refusal:
        parse_topology(text)
    for part in (f"--topology {text}", *parts):
        assert part in str(refusal.value)


@pytest.mark.parametrize("usable_gib", [0.0, -1.0, float("nan"), float("inf"), 1e308])
def test_memory_must_be_a_number_above_nothing(usable_gib):
    said = f"--usable-gib {usable_gib:g} must be a finite number above 0: leave it out"
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_topology("v6e:2x4", usable_gib)


def refusal_of(topology, *overrides, file=REFERENCE):
    config = load(file, overrides)
    with pytest.raises(ConfigError) as refusal:
        check_run_on(parse_topology(topology), config, asked_devices(config))
    return str(refusal.value)


def test_more_chips_than_there_are_are_refused_with_a_topology_that_has_them():
    said = refusal_of(
        "v6e:2x4",
        "placement.mode=separate",
        "placement.learner.tpus=8",
        "placement.rollout.tpus=4",
        "rollout.workers=2",
    )
    assert "placement asks for 16 chips, 8 for the learner and 4 for each of 2 rollout" in said
    assert "--topology v6e:2x4 has 8" in said
    assert "or give --topology v6e:4x4" in said


def test_a_number_of_chips_that_no_process_can_have_is_refused():
    said = refusal_of("v6e:2x4", "placement.learner.tpus=3")
    assert "placement.learner.tpus=3: a process can have 1, 2, 4, 8" in said


def test_a_run_for_another_platform_is_refused():
    said = refusal_of("cpu")
    assert "placement.platform=tpu, but --topology cpu is one of cpu: give --topology v6e" in said
    said = refusal_of("v6e:2x4", file="deploy/runs/demo_cpu.yaml")
    assert "give --topology cpu, or --set placement.platform=tpu" in said
    said = refusal_of("v6e:2x4", file="deploy/runs/gsm8k_smollm2_gpu.yaml")
    assert "placement.platform=gpu" in said and "no compiler for GPUs" in said


def test_a_loop_that_is_no_single_program_is_refused():
    said = refusal_of("v6e:2x4", "rollout.decode.loop=python")
    assert "rollout.decode.loop=python: only `while`" in said


def test_a_missing_compiler_is_said_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    said = refusal_of("v6e:2x4")
    assert "libtpu, the compiler, is not installed: pip install '.[tpu]'" in said


def test_chips_of_several_hosts_are_noted():
    (note,) = several_hosts(parse_topology("v6e:4x8"), Devices(learner=16, worker=8))
    assert "the 16 chips of the learner are those of 2 hosts with 8 each" in note
    assert several_hosts(parse_topology("v6e:2x4"), Devices(learner=4, worker=4)) == ()
