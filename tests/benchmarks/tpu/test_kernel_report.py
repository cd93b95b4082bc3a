"""The arithmetic on small programs written by hand; the command on the real compiler."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.tpu import budgets as tpu_budgets
from benchmarks.tpu import compile_kernel, issue_cycles, kernel_report
from benchmarks.tpu.kernel_programs import programs
from driver.chip_plan.compiled import cost_model, hlo
from driver.chip_plan.compiled.hlo import OpTraffic

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROBE = "probe/b8_t1024_v16384/xla"

KERNELS = (
    "decode_attention/b128_s512/pallas_tpu_prefix",
    "decode_attention/b16_s640/pallas_tpu",
    "head/t8192_d4096_v151936/pallas_tpu_fast",
    "head/t8192_d4096_v151936/pallas_tpu_lean",
    "packed_attention/t8192/pallas_tpu",
    "probe/b8_t1024_v16384/pallas_tpu",
    "token_logprob/b4_t1024_v151643/pallas_tpu",
)
"""Each kernel once. `make tpu-check` compiles all programs, minutes long."""

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)


def moved(text):
    """Bytes of one execution and executions, by operation; what moves nothing is left out."""
    found = hlo.traffic(hlo.parse_program(text))
    assert found.uncounted_loops == []
    return {op.name: (op.bytes, op.times) for op in found.ops if op.bytes}


def test_a_fusion_reads_its_operands_and_writes_its_outputs():
    text = """
%fused (p0: bf16[8,128], p1: f32[8]) -> (f32[8], bf16[8,128]) {
  %p0 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = f32[8]{0:T(1024)S(1)} parameter(1)
  ROOT %t = (f32[8]{0}, bf16[8,128]{1,0}) tuple(%p1, %p0)
}

ENTRY %main (a: bf16[8,128], b: f32[8]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="a"}
  %b = f32[8]{0:T(1024)S(1)} parameter(1)
  %f = (f32[8]{0:T(1024)}, /*index=1*/bf16[8,128]{1,0}) fusion(%a, /*index=1*/%b), calls=%fused
  ROOT %out = bf16[8,128]{1,0} get-tuple-element(%f), index=1
}
"""
    # b lies in the memory space 1, on the chip.
    assert moved(text) == {"f": (2 * 8 * 128 + 4 * 8 + 2 * 8 * 128, 1)}


def test_a_copy_to_the_fast_memory_moves_its_source_alone():
    text = """
ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0:T(256)} parameter(0)
  %s = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%a)
  ROOT %d = f32[256]{0:T(256)S(1)} copy-done(%s)
}
"""
    assert moved(text) == {"s": (4 * 256, 1)}


LOOP = """
%body (c: (s32[], f32[64,128], s32[])) -> (s32[], f32[64,128], s32[]) {
  %c = (s32[], f32[64,128]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n.1 = s32[] get-tuple-element(%c), index=2
  %x = f32[64,128]{1,0} get-tuple-element(%c), index=1
  %one = s32[] constant(2)
  %next = s32[]{:S(6)} add(%i, %one)
  %y = f32[64,128]{1,0} fusion(%x, %i), calls=%step
  ROOT %t = (s32[], f32[64,128]{1,0}, s32[]) tuple(%next, %y, %n.1)
}

%step (p: f32[64,128], i.1: s32[]) -> f32[64,128] {
  %p = f32[64,128]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[8,128]{1,0} dynamic-slice(%p, %i.1, %zero), dynamic_slice_sizes={8,128}
  %new = f32[8,128]{1,0} multiply(%part, %part)
  ROOT %u = f32[64,128]{1,0} dynamic-update-slice(%p, %new, %i.1, %zero)
}

%condition (c.1: (s32[], f32[64,128], s32[])) -> pred[] {
  %c.1 = (s32[], f32[64,128]{1,0}, s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%c.1), index=0
  %n = s32[] get-tuple-element(%c.1), index=2
  ROOT %lt = pred[] compare(%i.2, %n), direction=LT
}

ENTRY %main (a: f32[64,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  %first = s32[] constant(1)
  %start = s32[] copy(%first)
  %bound = s32[] BOUND
  %s = (s32[], f32[64,128]{1,0}, s32[]) tuple(%start, %a, %bound)
  %w = (s32[], f32[64,128]{1,0}, s32[]) while(%s), condition=%condition, body=%body
  ROOT %out = f32[64,128]{1,0} get-tuple-element(%w), index=1
}
"""


def test_a_loop_counts_its_rounds_and_an_update_in_place_only_its_part():
    found = moved(LOOP.replace("BOUND", "constant(8)"))
    # 1, 3, 5 and 7 are below 8; 8 rows of 128 are read and written, and an index is read.
    assert found["y"] == (2 * 4 * 8 * 128 + 4, 4)


def test_the_rounds_that_xla_states_are_believed():
    stated = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    text = LOOP.replace("BOUND", "parameter(1)").replace("body=%body", stated)
    assert moved(text)["y"][1] == 7


def test_a_loop_of_unknown_rounds_is_counted_once_and_named():
    found = hlo.traffic(hlo.parse_program(LOOP.replace("BOUND", "parameter(1)")))
    assert found.uncounted_loops == ["w"]
    assert {op.name: op.times for op in found.ops}["y"] == 1


CUSTOM_CALL = """
ENTRY %main (a: bf16[16,128], g: f32[16,128]) -> f32[16,128] {
  %a = bf16[16,128]{1,0} parameter(0)
  %g = f32[16,128]{1,0} parameter(1)
  %room = f32[99]{0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %k = f32[16,128]{1,0} custom-call(%a, %g), custom_call_target="tpu_custom_call", \
output_to_operand_aliasing={{}: (1, {})}, backend_config={"bytes_accessed":"STATED"}
}
"""


@pytest.mark.parametrize("stated, bytes_", [(1, 20480), (30000, 30000)])
def test_a_kernel_moves_its_arrays_once_or_what_it_states_if_that_is_more(stated, bytes_):
    # 4096 of a; g is added to in place: 8192 read and 8192 written.
    assert moved(CUSTOM_CALL.replace("STATED", str(stated))) == {"k": (bytes_, 1)}


def test_an_attribute_of_several_lines_ends_no_computation():
    text = """
ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %k = f32[64]{0} custom-call(%a), frontend_attributes={kernel_metadata={
"block": "512"
}}, metadata={op_name="k"}
  ROOT %b = f32[64]{0} negate(%k)
}
"""
    assert moved(text) == {"k": (512, 1), "b": (512, 1)}


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse_program("error: something else")


LOOPS = """
LB: loop body
    0   :  { %a = sst %b } /* Start region 1 */
  0x1 LB: > { %c = sst %d }
  0x2   :  {}
  0x3 PF: > { %p = scmp.ge.s32.totalorder %s1_s0, 9  ;;  %e = dma [thread:$0] /*
base_bounds: (4, 32) */ }
  0x4 LB: >> { %v1 = vld [vmem:[%s2]] }
  0x5   : >> { %p2 = scmp.ge.s32.totalorder %s3_s1, 4 /* loop exit test */ }
  0x6 LB: >> { %v2 = vld [vmem:[%s2]] }
  0x7   : >> { %p3 = scmp.ge.s32.totalorder %s4_s1, 2 /* loop exit test */ }
  0x8   : > { %p4 = scmp.ge.s32.totalorder %s5_s1, 10 /* loop exit test */ }
  0x9   :  { %f = sst %g }
"""


def test_cycles_are_the_bundles_of_loops_times_their_rounds():
    # In the outer loop 4 of its own (one is empty), 2 x 4 and 2 x 2; around it 2.
    assert issue_cycles.count_cycles(LOOPS) == 2 + 10 * (4 + 8 + 4)


def test_a_loop_of_unknown_trip_count_counts_once():
    assert issue_cycles.count_cycles(LOOPS.replace("/* loop exit test */", "")) == 10


def test_a_loop_without_a_mark_of_nesting_is_counted_where_it_stands():
    assert issue_cycles.count_cycles("0 : { a }\n0x1 LB: { b }\n0x2 : { c }\n") == 3


def test_a_text_without_bundles_is_refused():
    with pytest.raises(ValueError, match="no bundle in 'nothing'"):
        issue_cycles.count_cycles("nothing")


def test_dumps_of_final_schedules_are_known_by_their_names():
    name = "1795838512836944734-linear_objective_score.11-03-final_bundles.txt"
    assert issue_cycles.FILE.fullmatch(name)["op"] == "linear_objective_score.11"
    assert not issue_cycles.FILE.fullmatch(name.replace("03-final", "02-schedule-analysis_final"))


def test_an_operation_takes_the_longer_of_its_cycles_and_its_bytes():
    ops = [
        OpTraffic("bound_by_memory", "fusion", 1_640_000_000, 1),
        OpTraffic("bound_by_cycles", "fusion", 1640, 3),
        OpTraffic("copied", "copy-start", 3_280_000, 1),
        OpTraffic("small", "fusion", 1640, 1),
        OpTraffic("unseen", "fusion", 1_640_000, 1),
    ]
    cost = cost_model.program_cost(ops, {"bound_by_memory": 1, "bound_by_cycles": 1_750_000})
    assert [(op.name, op.ms) for op in cost.ops] == [
        ("bound_by_cycles", pytest.approx(3.0)),
        ("bound_by_memory", pytest.approx(1.0)),
        ("copied", pytest.approx(0.002)),
        ("unseen", pytest.approx(0.001)),
        ("small", pytest.approx(1e-6)),
    ]
    assert cost.cycles == 3 * 1_750_000 + 1
    assert cost.ms == pytest.approx(4.003001)
    assert cost.without_cycles == ["unseen"]


def judged(budget, *, cycles):
    """A program of one operation, which moves 1.64 MB, beside a budget."""
    figures = compile_kernel.Figures(
        temp_bytes=100,
        peak_bytes=2000,
        accessed_bytes=1_640_000,
        ops=[OpTraffic("f", "fusion", 1_640_000, 1)],
        op_cycles=cycles,
    )
    return kernel_report.judge("p", figures, budget)


def verdicts(entry):
    return {check["figure"]: check["verdict"] for check in entry["checks"]}


def test_a_figure_above_its_budget_breaks_it_and_is_named():
    budget = {"temp_bytes": 99, "peak_bytes": 2000, "cycles": 1749}
    entry = judged(budget, cycles={"f": 1750})
    assert verdicts(entry) == {
        "temp_bytes": "BROKEN",
        "peak_bytes": "held",
        "accessed_bytes": "no budget",
        "cycles": "BROKEN",
        "model_ms": "no budget",
    }
    broken, text = kernel_report.verdict([entry])
    assert broken == ["p: temp_bytes 100 is above 99", "p: cycles 1,750 is above 1,749"]
    assert "1 budgets held, 2 broken" in text


def test_an_operation_without_a_schedule_is_named():
    text = kernel_report.describe(judged({}, cycles={}), with_ops=False)
    assert "by their bytes alone f" in text


def test_a_program_that_does_not_compile_is_broken():
    entry = kernel_report.judge("p", compile_kernel.Figures(error="out of VMEM"), {})
    assert kernel_report.verdict([entry])[0] == ["p does not compile"]
    assert "out of VMEM" in kernel_report.describe(entry, with_ops=True)


def test_every_budget_is_that_of_a_program():
    assert set(tpu_budgets.load_budgets().programs) <= set(programs())


def test_a_budget_for_an_unknown_figure_is_refused(tmp_path):
    path = tmp_path / "budgets.json"
    path.write_text(json.dumps({"libtpu": "1", "programs": {"p": {"temp": 1}}}))
    with pytest.raises(ValueError, match="'temp'"):
        tpu_budgets.load_budgets(path)


def test_a_child_past_its_deadline_is_an_error_of_its_program():
    figures = compile_kernel.compile_in_child(PROBE, 0.1)
    assert "not done within 0.1 s" in figures.error


def test_without_libtpu_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kernel_report.main([]) == 2
    assert "pip install '.[tpu]'" in capsys.readouterr().err


@needs_compiler
def test_an_unknown_program_is_refused_with_the_nearest_name(capsys):
    assert kernel_report.main(["--only", "prob/b8_t1024_v16384/xla"]) == 2
    assert PROBE in capsys.readouterr().err


@pytest.mark.slow
@needs_compiler
def test_the_kernels_compile_and_hold_their_budgets(tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "kernels.tpu_report", "--only", *KERNELS, "--json", report],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert {entry["name"] for entry in found["programs"]} == set(KERNELS)
    for entry in found["programs"]:
        assert entry["checks"] and entry["uncounted_loops"] == []
        assert entry["cycles"] > 0
        # XLA gives attention its results in another layout by copies that have no schedule.
        assert entry["cost"]["without_cycles"] == [] or "attention" in entry["name"]
        # Whatever is in flight, the logits or the head's gradient are read and written.
        assert entry["accessed_bytes"] > entry["output_bytes"]
