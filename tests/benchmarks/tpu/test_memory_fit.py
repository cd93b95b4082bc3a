"""The verdict of tpu_check, on sizes made by hand."""

import pytest

from benchmarks.tpu.memory_fit import HEADER, V6E_USABLE_BYTES, RunProgram, table_row, verdict

GB = 10**9
ACCUMULATE = RunProgram(
    role="learner",
    name="accumulate",
    compile_s=61.25,
    peak_bytes=15 * GB,
    argument_bytes=6 * GB,
    output_bytes=3 * GB,
    temp_bytes=10 * GB,
    accessed_bytes=74 * GB,
    beside="optimiser moments",
    beside_bytes=6 * GB,
)
DECODE = RunProgram(role="worker", name="decode", compile_s=2, peak_bytes=9 * GB)
BROKEN = RunProgram(role="worker", name="prefill", compile_s=1, error="ran out of memory in hbm")


def test_a_chip_offers_what_a_v6e_leaves_to_programs():
    assert V6E_USABLE_BYTES == 33_554_432_000  # 31.25 x 1024^3


def test_what_stays_beside_a_program_counts():
    assert ACCUMULATE.need_bytes == 21 * GB
    assert ACCUMULATE.fits(21 * GB)
    assert not ACCUMULATE.fits(21 * GB - 1)


def test_all_that_fits_is_said_with_what_is_to_spare():
    fits, text = verdict([ACCUMULATE, DECODE], 30 * GB)
    assert fits
    assert text.splitlines() == [
        "learner fits: at most 21.00 GB in accumulate (optimiser moments of 6.00 GB included), "
        "9.00 GB of 30.00 GB to spare",
        "worker fits: at most 9.00 GB in decode, 21.00 GB of 30.00 GB to spare",
    ]


def test_one_program_that_does_not_fit_fails_the_run():
    fits, text = verdict([ACCUMULATE, DECODE], 20 * GB)
    assert not fits
    assert (
        "learner does NOT fit: 21.00 GB in accumulate (optimiser moments of 6.00 GB included), "
        "1.00 GB more than the 20.00 GB of a chip"
    ) in text
    assert "worker fits" in text


def test_a_program_that_does_not_compile_fails_the_run_and_says_why():
    fits, text = verdict([ACCUMULATE, BROKEN, DECODE], 30 * GB)
    assert not fits
    assert "worker prefill does not compile: ran out of memory in hbm" in text
    assert "worker fits" not in text


def test_nothing_compiled_is_no_pass():
    with pytest.raises(ValueError, match="nothing is known to fit"):
        verdict([], 30 * GB)


def test_a_row_stands_under_its_header():
    row = table_row(ACCUMULATE)
    figures = "61.2 s 6.00 3.00 10.00 15.00 6.00 21.00 74.00"
    assert row.split() == ["learner", "accumulate", *figures.split()]
    assert len(row) == len(HEADER)
    assert table_row(BROKEN).endswith("does not compile")
