"""Figures of one program: small ones compiled on the CPU, and what a compiler said."""

import jax
import jax.numpy as jnp
import pytest

from driver.chip_plan.run_program import PlannedProgram, ProgramCompiler, stated_peak

COMPILER = ProgramCompiler("learner", None, {"policy": 10})
KIB = jax.ShapeDtypeStruct((256,), jnp.float32)


def test_a_program_counts_its_arrays_and_those_beside_it():
    lower = lambda: jax.jit(lambda x: x + 1).lower(KIB)
    planned = PlannedProgram("add", lower, {"x": 1024}, {"y": 5}, makes={"sum": 1024})
    found = COMPILER.compile_program(planned)
    assert found.error == "" and found.need_bytes == found.peak_bytes + 15
    assert found.parts == {"x": 1024, "sum": 1024, "policy": 10, "y": 5, "temporaries": 0}
    assert found.model_ms is None


def test_an_argument_that_is_not_read_lies_on_the_chip_all_the_same():
    lower = lambda: jax.jit(lambda x, y: x + 1).lower(KIB, KIB)
    found = COMPILER.compile_program(PlannedProgram("add", lower, {"x": 2048}, {}))
    assert found.peak_bytes == 3 * 1024


def test_a_program_that_cannot_be_lowered_is_reported_like_one_that_does_not_compile():
    def lower():
        return jax.jit(lambda x: x @ x[:3]).lower(KIB)

    found = COMPILER.compile_program(PlannedProgram("broken", lower, {"x": 1024}, {"y": 5}))
    assert "contracting dimensions" in found.error
    assert found.peak_bytes == 0 and found.beside == {"y": 5, "policy": 10}
    assert not found.fits(10**12)


def test_the_loop_that_data_ends_counts_with_all_its_rounds():
    def loop(x, most):
        return jax.lax.while_loop(lambda it: it[1] < most, lambda it: (it[0] * 2, it[1] + 1), x)

    limit = jax.ShapeDtypeStruct((), jnp.int32)
    lower = lambda: jax.jit(loop).lower((KIB, limit), limit)
    one, many = (
        COMPILER.compile_program(PlannedProgram("loop", lower, {}, {}, rounds=rounds))
        for rounds in (2, 12)
    )
    assert many.open_loops == 0
    assert many.accessed_bytes - one.accessed_bytes >= 10 * 2 * 1024
    once = COMPILER.compile_program(PlannedProgram("loop", lower, {}, {}))
    assert once.open_loops == 1 and once.accessed_bytes < one.accessed_bytes


@pytest.mark.parametrize(
    "error, peak",
    [
        ("Ran out of memory in memory space hbm. Used 40.50G of 31.25G hbm.", 40.5 * 2**30),
        ("Exceeded: temporaries (512.0M), arguments (1.0G)", 7 + 512 * 2**20),
        ("Mosaic failed to compile TPU kernel", 0),
    ],
)
def test_what_a_compiler_says_of_the_memory_is_read(error, peak):
    assert stated_peak(error, 7) == peak
