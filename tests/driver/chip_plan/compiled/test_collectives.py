"""Bytes over the wires, counted in programs of a few lines by hand."""

import pytest

from driver.chip_plan.compiled.collectives import sent_bytes, wire_traffic
from driver.chip_plan.compiled.hlo import parse_program

PROGRAM = """
%body (state: (s32[], bf16[4,256])) -> (s32[], bf16[4,256]) {
  %state = (s32[], bf16[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[4,256]{1,0} get-tuple-element(%state), index=1
  %whole = bf16[16,256]{1,0:T(8,128)(2,1)S(1)} all-gather(%x), FOUR, dimensions={0}
  ROOT %next = (s32[], bf16[4,256]{1,0}) tuple(%i, %x)
}

%condition (state: (s32[], bf16[4,256])) -> pred[] {
  %state = (s32[], bf16[4,256]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%scattered (input: f32[8,128]) -> f32[2,128] {
  %input = f32[8,128]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %sum = f32[8,128]{1,0} all-reduce(%input), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %cut = f32[2,128]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={2,128}
}

%seldom (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  ROOT %moved = f32[8,128]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (a: f32[8,128], state: (s32[], bf16[4,256])) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %state = (s32[], bf16[4,256]{1,0}) parameter(1)
  %loop = (s32[], bf16[4,256]{1,0}) while(%state), TIMES, condition=%condition, body=%body
  %part = f32[2,128]{1,0} fusion(%a), kind=kCustom, calls=%scattered
  %one = s32[] constant(1)
  %maybe = f32[8,128]{1,0} conditional(%one, %a, %a), branch_computations={%seldom, %seldom}
  ROOT %total = f32[8,128]{1,0} all-reduce(%maybe), PAIRS, to_apply=%add
}
"""
for name, text in {
    "FOUR": "replica_groups={{0,1,2,3}}",
    "TIMES": 'backend_config={"known_trip_count":{"n":"36"}}',
    "PAIRS": "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
}.items():
    PROGRAM = PROGRAM.replace(name, text)


def test_every_kind_counts_what_one_chip_sends_in_a_ring():
    found = {one.kind: one[1:] for one in wire_traffic(parse_program(PROGRAM))}
    array = 8 * 128 * 4
    assert found == {
        # In each of 36 rounds three of four parts of 16 x 256 in bfloat16.
        "all-gather": (36, 36 * (16 * 256 * 2) * 3 // 4),
        # Over the four chips of a group, and only the own part stays.
        "reduce-scatter": (1, array * 3 // 4),
        # Over the axis of two alone.
        "all-reduce": (1, 2 * array // 2),
        # Both branches, although one of them is taken.
        "collective-permute": (2, 2 * array),
    }


def test_the_kind_that_sends_the_most_comes_first():
    kinds = [one.kind for one in wire_traffic(parse_program(PROGRAM))]
    assert kinds == ["all-gather", "collective-permute", "all-reduce", "reduce-scatter"]


def test_a_program_of_one_chip_sends_nothing():
    alone = PROGRAM.replace("{{0,1,2,3}}", "{{0}}").replace("[2,4]<=[8]", "[8,1]<=[8]")
    alone = alone.replace("{'axis_0'}", "{}").replace("{%seldom, %seldom}", "{}")
    assert wire_traffic(parse_program(alone)) == ()


HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=8"
ONE = """
ENTRY %main (a: f32[8,128], b: f32[4,64]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %b = f32[4,64]{1,0} parameter(1)
  ROOT %total = OPERATION
}
"""


def sent_by(operation, header=HEADER):
    """Bytes of a program that is this one collective."""
    return [
        one[1:] for one in wire_traffic(parse_program(header + ONE.replace("OPERATION", operation)))
    ]


ARRAY = 8 * 128 * 4


def test_a_collective_that_names_no_group_is_of_all_chips_of_the_program():
    everyone = "f32[8,128]{1,0} all-reduce(%a), replica_groups={}, to_apply=%add"
    assert sent_by(everyone) == [(1, 2 * ARRAY * 7 // 8)]
    assert sent_by(everyone, header="HloModule jit_step, replica_count=2, num_partitions=8") == [
        (1, 2 * ARRAY * 15 // 16)
    ]
    assert sent_by(everyone, header="HloModule jit_step") == []


def test_an_asynchronous_gather_of_several_arrays_counts_all_its_results():
    gathered = "(f32[8,128]{1,0}, f32[4,64]{1,0}), (f32[32,128]{1,0}, f32[16,64]{1,0})"
    start = f"({gathered}) all-gather-start(%a, %b), replica_groups=[2,4]<=[8], dimensions={{0}}"
    assert sent_by(start) == [(1, (32 * 128 * 4 + 16 * 64 * 4) * 3 // 4)]


def test_a_part_of_an_axis_counts_with_its_own_places():
    mesh = "f32[8,128]{1,0} all-reduce(%a), replica_groups=mesh['fsdp'=8] {AXES}, to_apply=%add"
    assert sent_by(mesh.replace("AXES", "'fsdp'")) == [(1, 2 * ARRAY * 7 // 8)]
    assert sent_by(mesh.replace("AXES", "'fsdp':(1)2")) == [(1, 2 * ARRAY // 2)]
    assert sent_by(mesh.replace("AXES", "'fsdp':(2)4")) == [(1, 2 * ARRAY * 3 // 4)]


def test_groups_of_an_unknown_form_are_not_guessed():
    with pytest.raises(ValueError, match="all-reduce total has groups of an unknown form: .*=all"):
        sent_by("f32[8,128]{1,0} all-reduce(%a), replica_groups=all, to_apply=%add")


@pytest.mark.parametrize(
    "kind, sent", [("all-gather", 750), ("reduce-scatter", 750), ("all-reduce", 1500)]
)
def test_what_is_sent_of_1000_bytes_by_four_chips(kind, sent):
    assert sent_bytes(kind, 4, 1000) == sent
