"""The search for the largest value that fits: which value comes next, and the whole on the CPU."""

import dataclasses

import pytest

from driver.chip_plan.run_program import RunProgram
from driver.chip_plan.run_shape import PlanRequest
from driver.chip_plan.search import (
    CONTEXT,
    MICROBATCH,
    MOST_TRIALS,
    SLOTS,
    Setting,
    Trial,
    largest_fitting,
    next_value,
    settings_of,
)
from driver.chip_plan.topology import parse_topology

SETTING = Setting(
    key=SLOTS,
    now=16,
    step=4,
    most=400,
    most_is="enough",
    roles=("worker",),
    programs=frozenset({"segment"}),
    grows=frozenset({"KV cache"}),
    overrides=lambda value: (f"rollout.decode.slots={value}",),
)


def searched(need_of, usable, now=16):
    """Values that are tried until it is settled, when a value needs `need_of(value)` bytes."""
    trials = [Trial(now, need_of(now), "segment", need_of(now) <= usable)]
    fixed = need_of(0)
    while (value := next_value(SETTING, trials, usable, fixed)) is not None:
        trials.append(Trial(value, need_of(value), "segment", need_of(value) <= usable))
        assert len(trials) < 20
    return [one.value for one in trials[1:]], max((t.value for t in trials if t.fits), default=None)


def test_where_memory_grows_evenly_two_trials_settle_it():
    tried, best = searched(lambda slots: 100 + 10 * slots, usable=1130)
    assert tried == [100, 104]  # 103 would fit, but 4 lanes share the slots
    assert best == 100


def test_a_configuration_that_does_not_fit_is_lowered():
    tried, best = searched(lambda slots: 100 + 10 * slots, usable=199, now=64)
    assert best == 8
    assert tried == [8, 12]


def test_a_step_in_the_memory_is_found_by_bisection():
    tried, best = searched(lambda slots: 100 + slots + 10_000 * (slots > 40), usable=1000)
    assert best == 40
    assert len(tried) <= 8


def test_nothing_larger_than_allowed_is_tried():
    assert searched(lambda slots: 100 + slots, usable=10_000) == ([400], 400)


def test_nothing_fits_below_the_first_value():
    assert searched(lambda slots: 100 + 10 * slots, usable=120) == ([4], None)


@pytest.fixture
def tiny():
    """One layer of the demo's model on the CPU, with so much memory."""

    def make(usable_bytes, *overrides):
        request = PlanRequest(
            path="deploy/runs/demo_cpu.yaml",
            overrides=("learner.microbatch_tokens=256", "rollout.decode.slots=8", *overrides),
            topology=parse_topology("cpu", usable_bytes / 2**30),
            layers=1,
        )
        return request, request.shape()

    return make


def test_the_largest_number_of_slots_is_compiled_and_the_next_one_exceeds_the_memory(tiny):
    _, shape = tiny(2**30)
    programs = list(shape.compile_programs(("worker",), frozenset({"segment"})))
    (program,) = programs
    # Room for a cache of about eight times the size, where the other parts stay.
    request, shape = tiny(program.need_bytes + 7 * program.parts["KV cache"])
    (setting,) = [one for one in settings_of(shape) if one.key == SLOTS]
    found = largest_fitting(request, setting, programs)
    assert found.fits is not None and found.exceeds is not None
    assert 32 < found.fits.value < found.exceeds.value <= 80
    assert found.fits.need_bytes <= request.topology.usable_bytes < found.exceeds.need_bytes
    assert found.overrides == (f"rollout.decode.slots={found.fits.value}",)
    assert f"at most {found.fits.value} (now 8)" in found.text


def test_what_does_not_fit_for_another_reason_is_searched_in_vain_and_said(tiny):
    request, shape = tiny(10_000)
    fixed = RunProgram(role="worker", name="segment", peak_bytes=20_000, inside={"policy": 20_000})
    (setting,) = [one for one in settings_of(shape) if one.key == SLOTS]
    found = largest_fitting(request, setting, [fixed])
    assert found.fits is None
    assert found.text == (
        "rollout.decode.slots: no value fits, what does not depend on it needs 20.00 kB alone"
    )


def test_the_settings_of_a_run_and_what_they_override(tiny):
    _, shape = tiny(2**30, "rollout.max_prompt_tokens=40", "rollout.max_completion_tokens=40")
    settings = {one.key: one for one in settings_of(shape)}
    assert settings[MICROBATCH].step == 128  # the first row that holds 79 tokens
    assert settings[MICROBATCH].now == 256
    assert settings[CONTEXT].most == shape.model.max_position_embeddings
    assert settings[CONTEXT].overrides(512) == (
        "rollout.max_prompt_tokens=40",
        "rollout.max_completion_tokens=472",
        "learner.microbatch_tokens=512",
    )


def test_a_search_ends_after_a_few_compilations(tiny):
    request, shape = tiny(2**40)
    (setting,) = [one for one in settings_of(shape) if one.key == SLOTS]
    small = dataclasses.replace(setting, most=16, most_is="as many as there are rows")
    programs = list(shape.compile_programs(("worker",), frozenset({"segment"})))
    said = []
    found = largest_fitting(request, small, programs, said.append)
    assert len(said) <= MOST_TRIALS
    assert found.fits is not None and found.fits.value == 16
    assert found.text.endswith("as many as there are rows")
