"""The check of attention passes what is right, and fails each fault that it exists to find."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gradcheck import attention
from benchmarks.gradcheck import cli as gradcheck
from benchmarks.gradcheck.gradient_errors import TOLERANCES
from kernels.packed_attention import reference

pytestmark = pytest.mark.slow

WIDER = "bfloat16"
"""The dtype with the wider tolerances: a fault that they find, the others find too."""


def failures(case=attention.ATTENTION_CASES[0]):
    """The arrays of which the default tolerances say something against `packed_attention`."""
    found = attention.check_attention(
        case, ["reference"], dtype=WIDER, tolerance=TOLERANCES[WIDER], seed=0
    )
    return {finding.array for finding in found if finding.problems}


def replace(monkeypatch, operation):
    monkeypatch.setattr(
        attention,
        "packed_attention",
        lambda *arrays, impl, **options: operation(*arrays, **options),
    )


def test_the_command_checks_attention(capsys):
    code = gradcheck.main(["--case", "attention_soft_cap", "--impl", "reference,xla", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {finding["candidate"] for finding in document["findings"]} == {
        "packed_attention reference",
        "packed_attention xla",
    }
    assert {each["array"] for each in document["findings"]} == {"out", "query", "key", "value"}


def test_segments_that_are_left_out_fail(monkeypatch):
    def one_segment(query, key, value, segment, **options):
        whole = jnp.where(segment != 0, 1, 0)
        return reference.packed_attention(query, key, value, whole, **options)

    replace(monkeypatch, one_segment)
    assert failures() == {"out", "query", "key", "value"}


def test_a_window_that_is_left_out_fails(monkeypatch):
    def without(*arrays, window, **options):
        return reference.packed_attention(*arrays, **options)

    replace(monkeypatch, without)
    assert failures(attention.ATTENTION_CASES[1]) == {"out", "query", "key", "value"}
    assert not failures()


def test_a_value_in_the_padding_fails(monkeypatch):
    def spill(query, key, value, segment, **options):
        out = reference.packed_attention(query, key, value, segment, **options)
        return jnp.where(segment[..., None, None] == 0, 1e-6, out).astype(out.dtype)

    replace(monkeypatch, spill)
    assert failures() == {"out"}


def test_a_gradient_of_the_key_that_is_off_by_a_hundredth_fails(monkeypatch):
    @jax.custom_vjp
    def stretched(key):
        return key

    stretched.defvjp(
        lambda key: (key, None), lambda _, d_key: ((1.01 * d_key).astype(d_key.dtype),)
    )

    def off(query, key, *rest, **options):
        return reference.packed_attention(query, stretched(key), *rest, **options)

    replace(monkeypatch, off)
    assert failures() == {"key"}
