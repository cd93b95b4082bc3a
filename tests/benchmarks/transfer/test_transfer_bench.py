"""The benches measure what they say, at a size at which seconds mean nothing."""

import pytest

from benchmarks.report_file import table
from benchmarks.transfer.cli import main


def test_table_aligns_text_left_and_numbers_right():
    assert table("title", ("a", "bb"), [("xyz", 1), ("w", 22.5)]).splitlines() == [
        "title",
        "",
        "a      bb",
        "xyz     1",
        "w    22.5",
    ]


def cells(capsys, *arguments: str) -> list[list[str]]:
    main(arguments)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_relay_bench_shows_the_tree_and_what_the_learner_sends(capsys):
    title, _, _, *rows = cells(capsys, "relay", "--workers", "3", "--mib", "1", "--fanout", "1")
    assert title[-2:] == ["1.00", "copies"]
    assert [row[:4] for row in rows] == [
        ["rollout-0", "learner", "learner", "1"],
        ["rollout-1", "rollout-0", "rollout-0", "2"],
        ["rollout-2", "rollout-1", "rollout-1", "3"],
    ]


def test_delta_bench_tells_what_is_sent(capsys):
    _, _, _, *rows = cells(capsys, "delta", "--mib", "1", "--shares", "0", "0.01", "0.9")
    assert [row[:2] for row in rows] == [["0", "delta"], ["0.01", "delta"], ["0.9", "all"]]
    shares = [float(row[3]) for row in rows]
    assert shares[0] == 0 and 0.01 < shares[1] < 0.02 and shares[2] == 1


def test_pull_bench_compares_with_a_bare_stream(capsys):
    title, _, heads, *rows = cells(capsys, "pull", "--mib", "1", "--rounds", "1")
    assert "bfloat16," in title and heads[-8:] == [
        "of",
        "bare",
        "1024",
        "KiB",
        "of",
        "bare",
        "2048",
        "KiB",
    ]
    assert [row[0] for row in rows] == ["bare", "bare", "pull,", "first"]


@pytest.mark.parametrize("arguments", [["pull", "--mib", "0"], ["relay", "--workers", "-1"], []])
def test_sizes_that_mean_nothing_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    capsys.readouterr()
