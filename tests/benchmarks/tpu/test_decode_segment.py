"""What a decoded token costs a TPU: how the figures are read, and the command on a narrow model."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from driver.chip_plan.compiled import hlo

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[3]
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)
TWINS = """
%square (a.1: bf16[8,128]) -> bf16[8,128] {
  %a.1 = bf16[8,128]{1,0} parameter(0)
  ROOT %b.1 = bf16[8,128]{1,0} multiply(%a.1, %a.1)
}

%again (a.2: bf16[8,128]) -> bf16[8,128] {
  %a.2 = bf16[8,128]{1,0} parameter(0)
  ROOT %b.2 = bf16[8,128]{1,0} multiply(%a.2, %a.2)
}

%other (a.3: bf16[8,128]) -> bf16[8,128] {
  %a.3 = bf16[8,128]{1,0} parameter(0)
  ROOT %b.3 = bf16[8,128]{1,0} add(%a.3, %a.3)
}

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %first = bf16[8,128]{1,0} fusion(%x), kind=kLoop, calls=%square
  %second = bf16[8,128]{1,0} fusion(%first), kind=kLoop, calls=%again
  ROOT %third = bf16[8,128]{1,0} fusion(%second), kind=kLoop, calls=%other
}
"""
PREFETCH = (
    "%fetch = (bf16[1024,128]{1,0}, bf16[64,128]{1,0:S(1)}, u32[]) "
    "slice-start(%x), slice={[0:64], [0:128]}"
)


@pytest.fixture
def decode_segment(tpu_command):
    return tpu_command("decode_segment")


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "deploy.tpu_decode", *map(str, arguments)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"},
        capture_output=True,
        text=True,
    )


def test_an_operation_takes_the_cycles_of_the_equal_one_that_was_scheduled(decode_segment):
    module = hlo.parse_program(TWINS)
    cycles = decode_segment.with_twins(module, {"first": 70})
    assert cycles == {"first": 70, "second": 70}, "the third does something else"


def test_a_slice_that_is_fetched_moves_what_it_fetches():
    module = hlo.parse_program(f"ENTRY %main (x: bf16[1024,128]) -> u32[] {{\n  {PREFETCH}\n}}")
    op = module.computations["main"]["fetch"]
    size = 64 * 128 * 2
    assert hlo.fetched_bytes(op) == size, "once: it is written to fast memory"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "qwen2.5-3b", "--slots", "12"], "--slots 12 must be a positive multiple"),
        (["--shape", "qwen2.5-3b", "--tensor", "3"], "--tensor 3 must divide the 8 chips"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(decode_segment, capsys, arguments, message):
    assert decode_segment.main(arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_shape_that_is_not_known_is_refused_in_one_line(decode_segment, capsys):
    with pytest.raises(SystemExit, match="2"):
        decode_segment.main(["--shape", "nothing"])
    assert "nothing" in capsys.readouterr().err.splitlines()[-1]


@needs_compiler
@pytest.mark.slow
def test_a_cut_token_step_holds_a_part_of_the_weights_and_adds_up_over_chips(tmp_path):
    report = tmp_path / "report.json"
    done = run(
        *("--shape", "qwen2.5-3b", "--layers", 1, "--slots", 16, "--tensor", 1, "--tensor", 2),
        *("--compare", "", "--prompt", 64, "--new", 64, "--json", report),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = whole, cut = json.loads(report.read_text())["programs"]
    assert (whole["tensor"], cut["tensor"]) == (1, 2)
    assert whole["collectives"] == 0 < cut["collectives"]
    assert 1.9 < whole["weight_bytes"] / cut["weight_bytes"] < 2.1
    for one in found:
        # Every weight is read in a token step, and little else of so short sequences.
        assert one["weight_bytes"] < one["token_bytes"] < 1.5 * one["weight_bytes"]
        assert one["token_cycles"] > 0 and not one["without_cycles"]
