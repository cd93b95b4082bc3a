"""The bench of attention: what it reports is right, and it refuses what cannot work."""

import json

import numpy as np
import pytest

from benchmarks.kernels import attention
from benchmarks.kernels import cli as bench

pytestmark = pytest.mark.slow

SMALL = ("--time", "300", "--heads", "4", "--kv-heads", "2", "--head-size", "16", "--iters", "1")


def run(capsys, *flags):
    code = bench.main(["attention", *SMALL, *flags])
    return code, *capsys.readouterr()


def test_implementations_are_measured_in_turn_and_against_float64(capsys, tmp_path):
    file = tmp_path / "bench.json"
    flags = ("--segments", "3", "--dtype", "float32", "--window", "50", "--soft-cap", "3")
    code, out, _ = run(capsys, *flags, "--json", str(file))
    document = json.loads(file.read_text())
    assert code == 0 and "auto / reference" in out
    assert [each["kernel"] for each in document["runs"]] == ["reference", "xla"]
    for measured in document["runs"]:
        assert set(measured["errors"]) == {"out", "query", "key", "value"}
        for each in measured["errors"].values():
            assert 0 < each["rel_l2"] < 1e-5  # float32 sums over 100 tokens
        assert 0 < measured["p50_ms"] <= measured["p90_ms"]
        assert measured["compiler"]["temp_bytes"] > 0
    assert document["ratios"]["auto / reference"] > 0


def test_the_error_of_a_wrong_result_shows(capsys, monkeypatch):
    right = attention.packed_attention
    wrong = lambda query, key, value, segment, **rest: right(
        query, key, value, 0 * segment + 1, **rest
    )
    monkeypatch.setattr(attention, "packed_attention", wrong)
    code, out, _ = run(capsys, "--compare", "xla", "--dtype", "float32", "--json")
    # The first segment sees nothing wrong; what comes of its keys in later ones does.
    found = json.loads(out)["runs"][0]["errors"]
    assert code == 0 and found["out"]["rel_l2"] < 1e-5 and found["value"]["rel_l2"] > 0.1


def test_segments_are_as_many_as_asked_and_of_one_length():
    fields = attention.SIZES | {"time": 10, "segments": 3, "heads": 2, "kv_heads": 1}
    case = attention.AttentionCase(dtype="float32", window=None, soft_cap=None, seed=0, **fields)
    np.testing.assert_array_equal(case.arrays()[3], [[1, 1, 1, 1, 2, 2, 2, 3, 3, 3]])


@pytest.mark.parametrize(
    "flags, part",
    [
        (("--segments", "301"), "--segments must be at most --time 300, got 301"),
        (("--kv-heads", "3"), "--heads must be a multiple of --kv-heads 3, got 4"),
        (("--batch", "0"), "--batch must be at least 1, got 0"),
        (("--window", "0"), "window must be None or a whole number of at least 1, got 0"),
        (("--compare", "xla,xla"), "--compare names an implementation twice"),
        (("--compare", "cudnn"), "got 'cudnn'"),
        (("--iters", "-1"), "--iters must be at least 0, got -1"),
        (("--json", "no/such/file"), "its folder does not exist"),
    ],
)
def test_wrong_arguments_exit_with_2(capsys, flags, part):
    code, _, err = run(capsys, *flags)
    assert code == 2 and part in err
