"""An update is timed beside the same one in torch, and only where it is the same."""

import json
import math

import pytest

from benchmarks.update.cli import check_norms, main
from tests.tiny_model import write_tiny_model

pytest.importorskip("torch")
SMALL = ("--groups", "2", "--group", "2", "--prompt", "5", "--completion", "7", "--repeat", "1")


@pytest.mark.slow
def test_both_sides_make_the_same_update(tmp_path, capsys):
    write_tiny_model(tmp_path / "model")
    report = tmp_path / "found.json"
    model = ("--model", str(tmp_path / "model"), "--microbatch", "24", "--warmup", "0")
    assert main([*SMALL, *model, "--json", str(report)]) == 0
    assert "4 sequences of 12 tokens, float32" in capsys.readouterr().out
    found = json.loads(report.read_text())
    ours, theirs = found["sides"]["tandem"], found["sides"]["torch"]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert found["ratio"] == pytest.approx(ours["us_per_token"] / theirs["us_per_token"])


@pytest.mark.parametrize("one, other", [(1.0, 1.01), (math.nan, 1.0), (1.0, math.nan)])
def test_other_gradients_are_no_comparison(one, other):
    check_norms({"tandem": 1.0, "torch": 1.0005}, "float32")
    with pytest.raises(ValueError, match="the norms of the first gradients differ"):
        check_norms({"tandem": one, "torch": other}, "float32")


@pytest.mark.parametrize(
    "flags, problem",
    [
        (["--group", "1"], "--group 1: advantages need at least 2 completions"),
        (["--microbatch", "11"], "--microbatch 11 cannot hold one sequence of 12 tokens"),
        (["--warmup", "-1"], "--warmup -1 must be at least 0"),
        (["--layers", "2"], "--layers 2 cuts a --shape"),
        (["--model", "no/such"], "--model no/such: no HF folder"),
        (["--repeat", "0"], "must be at least 1"),
    ],
)
def test_bad_arguments_are_named(capsys, flags, problem):
    assert main([*SMALL, *flags]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_a_side_that_ends_is_named(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert main([*SMALL, "--model", str(folder)]) == 2
    assert "the process of tandem ended with exit code 1" in capsys.readouterr().err
