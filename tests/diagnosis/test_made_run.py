"""The made-up run that the tests of the dashboard stand on is like a real one."""

import itertools
import json

import pytest

from benchmarks.made_run.made_run import make_run
from services.process.phases import PHASES


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_phases_of_every_process_add_up_to_the_step(tmp_path, max_staleness):
    make_run(tmp_path, steps=25, workers=3, max_staleness=max_staleness)
    for record in lines(tmp_path / "ledger.jsonl"):
        for process, row in record["processes"].items():
            assert list(row) == list(PHASES)
            assert sum(row.values()) == pytest.approx(record["wall_s"]), process


def test_spans_add_up_to_the_ledger_and_do_not_overlap(tmp_path):
    make_run(tmp_path, steps=5)
    ledger, timeline = lines(tmp_path / "ledger.jsonl"), lines(tmp_path / "timeline.jsonl")
    for booked, drawn in zip(ledger, timeline, strict=True):
        for process, lane in drawn["processes"].items():
            spans = lane["spans"]
            assert all(a[1] + a[2] <= b[1] + 2e-4 for a, b in itertools.pairwise(spans))
            decode_s = sum(s for phase, _, s in spans if PHASES[phase] == "decode")
            assert decode_s == pytest.approx(booked["processes"][process]["decode"], abs=1e-3)


def test_workers_come_in_equal_parts_of_the_run(tmp_path):
    make_run(tmp_path, steps=30, workers=1, workers_to=3)
    counts = [len(record["processes"]) - 1 for record in lines(tmp_path / "ledger.jsonl")]
    assert counts == [1] * 11 + [2] * 10 + [3] * 10


def test_reward_rises(tmp_path):
    make_run(tmp_path, steps=60)
    rewards = [r.get("reward/total/mean") for r in lines(tmp_path / "metrics.jsonl")]
    assert rewards[0] is None and sum(rewards[-5:]) > sum(rewards[1:6]) + 1


def test_runs_of_one_seed_are_equal_up_to_where_they_part(tmp_path):
    make_run(tmp_path / "a", steps=20)
    make_run(tmp_path / "b", steps=20, part_at=13)
    a, b = (lines(tmp_path / run / "metrics.jsonl") for run in "ab")
    assert [x == y for x, y in zip(a, b, strict=True)] == [True] * 13 + [False] * 8
