"""What of a program's text counts as an ordinary run, on programs of a few lines."""

from driver.chip_plan.compiled import hlo

LOOPS = """
HloModule jit_step, is_scheduled=true, num_partitions=4, replica_count=2

%small (s: f32[8,128]) -> f32[8,128] {
  %s = f32[8,128]{1,0} parameter(0)
  ROOT %twice = f32[8,128]{1,0} add(%s, %s)
}

%large (l: f32[8,128]) -> f32[8,128] {
  %l = f32[8,128]{1,0} parameter(0)
  %square = f32[8,128]{1,0} multiply(%l, %l)
  ROOT %sum = f32[8,128]{1,0} add(%square, %l)
}

%condition (c: f32[8,128]) -> pred[] {
  %c = f32[8,128]{1,0} parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[8,128], n: s32[]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %fetch = (f32[8,128]{1,0}, f32[2,128]{1,0:S(1)}, u32[]) slice-start(%x), slice={[0:2], [0:128]}
  %part = f32[2,128]{1,0:S(1)} slice-done(%fetch)
  %maybe = f32[8,128]{1,0} conditional(%n, %x, %x), branch_computations={%small, %large}
  %first = f32[8,128]{1,0} while(%maybe), condition=%condition, body=%small
  ROOT %second = f32[8,128]{1,0} while(%first), TIMES, condition=%condition, body=%large
}
"""
COUNTED = LOOPS.replace("TIMES", 'backend_config={"known_trip_count":{"n":"3"}}')
ARRAY = 8 * 128 * 4


def test_an_ordinary_run_takes_no_branch_and_moves_what_a_slice_fetches():
    found = {op.name: (op.bytes, op.times) for op in hlo.ordinary_ops(hlo.parse_program(COUNTED))}
    assert found == {
        "fetch": (2 * 128 * 4, 1),
        "twice": (3 * ARRAY, 1),  # an operand that is named twice is read twice
        "square": (3 * ARRAY, 3),
        "sum": (3 * ARRAY, 3),
    }


def test_the_longest_loop_moves_the_most_in_a_round():
    module = hlo.parse_program(COUNTED)
    assert hlo.longest_loop(module) == "large"
    assert hlo.longest_loop(module, only=hlo.traffic(module).uncounted_loops) == "small"
    assert hlo.longest_loop(module.entered_at("large")) == "large", "all its computations are there"
    assert hlo.longest_loop(module, only=()) is None


def test_a_program_is_run_by_all_partitions_of_all_replicas():
    module = hlo.parse_program(COUNTED)
    assert module.chips == module.entered_at("large").chips == 8
    assert hlo.parse_program(COUNTED.partition("\n\n")[2]).chips == 1
