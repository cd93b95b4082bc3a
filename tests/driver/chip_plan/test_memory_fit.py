"""The verdict of a plan, on sizes made by hand."""

import pytest

from driver.chip_plan.memory_fit import roles_that_do_not_fit, verdict
from driver.chip_plan.run_program import RunProgram, added

GB = 10**9
ACCUMULATE = RunProgram(
    role="learner",
    name="accumulate",
    peak_bytes=15 * GB,
    inside={"parameters": 3 * GB, "gradients": 3 * GB, "frozen models": 0},
    beside={"optimiser state": 6 * GB},
)
APPLY = RunProgram(role="learner", name="apply", peak_bytes=20 * GB + 1)
DECODE = RunProgram(role="worker", name="segment", peak_bytes=9 * GB, inside={"policy": 9 * GB})
BROKEN = RunProgram(role="worker", name="prefill", error="no such tiling")


def test_what_stays_beside_a_program_counts():
    assert ACCUMULATE.need_bytes == 21 * GB
    assert ACCUMULATE.fits(21 * GB)
    assert not ACCUMULATE.fits(21 * GB - 1)


def test_the_parts_add_up_to_the_need_with_what_has_no_name():
    assert ACCUMULATE.parts == {
        "optimiser state": 6 * GB,
        "parameters": 3 * GB,
        "gradients": 3 * GB,
        "temporaries": 9 * GB,
    }
    assert sum(ACCUMULATE.parts.values()) == ACCUMULATE.need_bytes


def test_parts_of_one_name_add_up():
    assert added({"policy": 1, "pool": 2}, {"policy": 4}) == {"policy": 5, "pool": 2}


def test_all_that_fits_is_said_with_what_is_to_spare():
    fits, text = verdict([ACCUMULATE, DECODE], 30 * GB)
    assert fits
    assert text.splitlines() == [
        "learner fits: at most 21.00 GB in accumulate (optimiser state 6.00 GB, parameters "
        "3.00 GB, gradients 3.00 GB, temporaries 9.00 GB), 9.00 GB of 30.00 GB to spare",
        "worker fits: at most 9.00 GB in segment (policy 9.00 GB), 21.00 GB of 30.00 GB to spare",
    ]


def test_one_program_that_does_not_fit_fails_the_run():
    fits, text = verdict([ACCUMULATE, APPLY, DECODE], 20 * GB, "a v6e chip")
    assert not fits
    learner, worker = text.splitlines()
    assert learner.startswith("learner does NOT fit: 21.00 GB in accumulate (optimiser state")
    assert learner.endswith("1.00 GB more than the 20.00 GB of a v6e chip; nor do apply")
    assert worker.startswith("worker fits")
    assert roles_that_do_not_fit([ACCUMULATE, APPLY, DECODE], 20 * GB) == {"learner": ACCUMULATE}


def test_a_program_that_does_not_compile_fails_the_run_and_says_why():
    fits, text = verdict([ACCUMULATE, BROKEN, DECODE], 30 * GB)
    assert not fits
    assert "worker prefill does not compile: no such tiling" in text
    assert "worker fits" not in text


def test_nothing_compiled_is_no_pass():
    with pytest.raises(ValueError, match="nothing is known to fit"):
        verdict([], 30 * GB)
