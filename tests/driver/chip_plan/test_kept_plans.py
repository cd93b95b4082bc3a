"""The plans in deploy/plans are of the programs, sizes, kernels and compiler of now."""

import importlib.util
import json
import pathlib
import shlex

import pytest

from driver.chip_plan.chips import LIBTPU_ENVIRONMENT
from driver.chip_plan.compiled.compiler_versions import compiler_versions

ROOT = pathlib.Path(__file__).resolve().parents[3]
PLANS = sorted((ROOT / "deploy/plans").glob("*.json"))
NAMES = [path.name for path in PLANS]

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)


def request_of(found):
    from driver.chip_plan.run_shape import PlanRequest
    from driver.chip_plan.topology import parse_topology

    return PlanRequest(
        path=found["config"],
        overrides=tuple(found["overrides"]),
        topology=parse_topology(found["topology"]),
    )


@pytest.fixture
def kept(request, monkeypatch):
    """A plan of deploy/plans."""
    monkeypatch.chdir(ROOT)
    for variable, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    return json.loads(request.param.read_text())


def test_there_are_plans_of_the_reference_run_and_of_larger_ones():
    assert "gsm8k_qwen25_3b_v6e8.json" in NAMES
    assert len(NAMES) >= 2


@pytest.mark.parametrize("kept", PLANS, ids=NAMES, indirect=True)
def test_a_kept_plan_names_its_command_and_its_parts_add_up(kept):
    again = f"python -m driver.plan --config {kept['config']} --topology {kept['topology']}"
    again += "".join(f" --set {shlex.quote(one)}" for one in kept["overrides"])
    assert kept["command"] == again
    for program in kept["programs"]:
        assert sum(program["parts"].values()) == program["needs_bytes"]
    needs = max(program["needs_bytes"] for program in kept["programs"])
    broken = any(program["error"] for program in kept["programs"])
    assert kept["fits"] == (needs <= kept["usable_bytes"] and not broken)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kept", PLANS, ids=NAMES, indirect=True)
def test_a_kept_plan_is_current(kept):
    from driver.chip_plan.fingerprint import fingerprint

    if compiler_versions() != kept["versions"]:
        pinned = (ROOT / "constraints.txt").read_text()
        assert f"jax=={kept['versions']['jax']}" in pinned, f"out of date: {kept['command']}"
        pytest.skip(f"the plan is of {kept['versions']}, installed is {compiler_versions()}")
    request = request_of(kept)
    assert fingerprint(request, request.shape()) == kept["fingerprint"], (
        f"out of date, make it anew with --json: {kept['command']}"
    )


@pytest.mark.tpu
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kept", PLANS, ids=NAMES, indirect=True)
def test_a_kept_plan_has_the_figures_of_the_compiler(kept):
    """Every program anew: many minutes. It needs no chip and is left out with those that do."""
    shape = request_of(kept).shape()
    needs = {(one["role"], one["name"]): one["needs_bytes"] for one in kept["programs"]}
    for program in shape.compile_programs(("learner", "worker")):
        assert program.need_bytes == needs[program.role, program.name]
