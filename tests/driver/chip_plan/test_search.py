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
    LargestSearch,
    Setting,
    Trial,
    next_value,
    settings_of,
)
from driver.chip_plan.topology import parse_topology

SETTING = Setting(
    key=SLOTS,
    now=16,
    step=4,
    least=4,
    most=400,
    most_is="enough",
    roles=("worker",),
    programs=frozenset({"segment"}),
    grows=frozenset({"KV cache"}),
    overrides=lambda value: (f"rollout.decode.slots={value}",),
)


def searched(need_of, usable, now=16, accepts=lambda value: True, setting=SETTING):
    """Values that are tried until it is settled, when a value needs `need_of(value)` bytes and the
    configuration accepts some; and the largest that fits.
    """
    setting = dataclasses.replace(setting, now=now)
    trials = [Trial(now, need_of(now), "segment", need_of(now) <= usable)]
    fixed = need_of(0)
    while (value := next_value(setting, trials, usable, fixed)) is not None:
        if accepts(value):
            trials.append(Trial(value, need_of(value), "segment", need_of(value) <= usable))
        else:
            trials.append(Trial(value, refused="not here"))
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


def test_a_refused_value_does_not_end_the_search():
    even = lambda slots: 100 + 10 * slots
    tried, best = searched(even, usable=1130, accepts=lambda value: value <= 48)
    assert tried[0] == 100 and best == 48
    tried, best = searched(even, usable=199, now=64, accepts=lambda value: value >= 8)
    assert (tried, best) == ([8, 12], 8)
    tried, best = searched(even, usable=120, now=64, accepts=lambda value: value >= 8)
    assert (tried[0], tried[-1], best) == (4, 8, None)


def test_the_least_value_is_tried_although_it_is_no_multiple():
    setting = dataclasses.replace(SETTING, step=128, least=80, most=4096)
    even = lambda tokens: 100 + 10 * tokens
    assert searched(even, usable=1000, now=256, setting=setting) == ([128, 80], 80)
    assert searched(even, usable=800, now=256, setting=setting) == ([128, 80], None)
    # A value that is no multiple itself is left for multiples.
    assert searched(even, usable=6000, now=300, setting=setting) == ([512, 640], 512)


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


def setting_of(shape, key):
    (setting,) = [one for one in settings_of(shape) if one.key == key]
    return setting


SCORES = (
    *("algorithm.advantage=gae", "algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"),
    *("algorithm.kl_in=reward", "algorithm.off_policy.token_truncate=2"),
)


@pytest.mark.parametrize(
    "key, role, now, other",
    [
        (MICROBATCH, "learner", 240, 480),  # three rows of 64 tokens beside one of 128
        (SLOTS, "worker", 8, 16),
        (CONTEXT, "worker", 512, 32),
    ],
)
def test_the_programs_of_a_setting_are_those_that_another_value_changes(
    tiny, key, role, now, other
):
    long = ("rollout.max_completion_tokens=472", "learner.microbatch_tokens=512")
    given = SCORES if role == "learner" else long
    _, shape = tiny(2**30, *given)
    setting = setting_of(shape, key)
    texts = []
    for value in (now, other):
        _, shape = tiny(2**30, *given, *setting.overrides(value))
        texts.append({one.name: one.lower().as_text() for one in shape.planned(role)})
    changed = {name for name in texts[0] if texts[0][name] != texts[1].get(name)}
    assert changed == setting.programs & set(texts[0])
    assert len(changed) >= 4


def test_the_largest_number_of_slots_is_compiled_and_the_next_one_exceeds_the_memory(tiny):
    _, shape = tiny(2**30)
    programs = list(shape.compile_programs(("worker",)))
    worst = max(programs, key=lambda one: one.need_bytes)
    # Room for a cache of about eight times the size, where the other parts stay.
    request, shape = tiny(worst.need_bytes + 7 * worst.parts["KV cache"])
    found = LargestSearch(request).largest_fitting(setting_of(shape, SLOTS), programs)
    assert found.fits is not None and found.exceeds is not None
    assert 32 < found.fits.value < found.exceeds.value <= 80
    assert found.fits.need_bytes <= request.topology.usable_bytes < found.exceeds.need_bytes
    assert found.overrides == (f"rollout.decode.slots={found.fits.value}",)
    assert f"at most {found.fits.value} (now 8)" in found.text


def test_what_does_not_fit_for_another_reason_is_searched_in_vain_and_said(tiny):
    request, shape = tiny(10_000)
    fixed = RunProgram(role="worker", name="segment", peak_bytes=20_000, inside={"policy": 20_000})
    found = LargestSearch(request).largest_fitting(setting_of(shape, SLOTS), [fixed])
    assert found.fits is None
    assert found.text == (
        "rollout.decode.slots: no value fits, what does not depend on it needs 20.00 kB alone in "
        "worker segment"
    )


def test_temporaries_of_a_program_without_micro_batches_do_not_shrink_with_them(tiny):
    request, shape = tiny(10_000)
    own = [
        RunProgram(role="learner", name="accumulate", peak_bytes=9_000),
        RunProgram(role="learner", name="apply", peak_bytes=20_000),
    ]
    found = LargestSearch(request).largest_fitting(setting_of(shape, MICROBATCH), own)
    assert found.fits is None and "20.00 kB alone in learner apply" in found.text


def test_a_program_that_does_not_compile_whatever_the_value_is_said(tiny):
    request, shape = tiny(10_000)
    own = [
        RunProgram(role="learner", name="accumulate", peak_bytes=9_000),
        RunProgram(role="learner", name="apply", error="no such tiling"),
    ]
    found = LargestSearch(request).largest_fitting(setting_of(shape, MICROBATCH), own)
    assert found.text.endswith("no value fits, learner apply does not compile")


def test_the_settings_of_a_run_and_what_they_override(tiny):
    _, shape = tiny(2**30, "rollout.max_prompt_tokens=40", "rollout.max_completion_tokens=40")
    settings = {one.key: one for one in settings_of(shape)}
    assert settings[MICROBATCH].step == 128  # the first row that holds 79 tokens
    assert settings[MICROBATCH].least == 80  # one row of its own length
    assert settings[MICROBATCH].now == 256
    assert settings[CONTEXT].most == shape.model.max_position_embeddings
    assert settings[CONTEXT].overrides(512) == (
        "rollout.max_prompt_tokens=40",
        "rollout.max_completion_tokens=472",
        "learner.microbatch_tokens=512",
    )


def test_the_step_of_micro_batches_does_not_depend_on_the_present_one(tiny):
    steps = [
        setting_of(tiny(2**30, f"learner.microbatch_tokens={tokens}")[1], MICROBATCH).step
        for tokens in (80, 240, 300)
    ]
    assert steps == [128] * 3


def test_a_search_ends_after_a_few_compilations_and_none_is_made_twice(tiny):
    request, shape = tiny(2**40)
    small = dataclasses.replace(
        setting_of(shape, SLOTS), most=16, most_is="as many as there are rows"
    )
    programs = list(shape.compile_programs(("worker",)))
    said = []
    search = LargestSearch(request, said.append)
    found = search.largest_fitting(small, programs)
    assert 1 <= len(said) <= MOST_TRIALS
    assert found.fits is not None and found.fits.value == 16
    assert found.text.endswith("as many as there are rows")
    before = len(said)
    assert search.largest_fitting(small, programs) == found
    assert len(said) == before


def test_a_value_that_the_configuration_refuses_is_said_with_the_reason(tiny):
    request, shape = tiny(2**40)
    shortest = dataclasses.replace(
        setting_of(shape, CONTEXT), now=80, step=512, least=512, most=1024
    )
    known = [RunProgram(role="worker", name="segment", peak_bytes=10**6)]
    found = LargestSearch(request).largest_fitting(shortest, known)
    assert found.fits is not None and found.fits.value == 512
    assert "; 1,024 is refused: rollout.max_prompt_tokens=40 + " in found.text


def test_the_larger_cache_counts_beside_the_programs_of_a_learner_on_the_same_memory(tiny):
    _, shape = tiny(2**30)
    (snapshot,) = shape.compile_programs(("learner",), frozenset({"snapshot"}))
    snapshot = dataclasses.replace(snapshot, peak_bytes=10**8)  # more than any of the worker's
    request, shape = tiny(snapshot.need_bytes + snapshot.beside["KV cache"] * 3 // 2)
    setting = dataclasses.replace(setting_of(shape, SLOTS), step=8, least=8)
    (segment,) = shape.compile_programs(("worker",), frozenset({"segment"}))
    found = LargestSearch(request).largest_fitting(setting, [segment, snapshot])
    assert found.fits is not None and found.exceeds is not None
    assert (found.fits.value, found.exceeds.value) == (16, 24)
    assert found.exceeds.program == "learner snapshot"
