"""Each prompt and group that was dropped has its reason and its place in the data."""

import json

import pytest

from driver.accounting.leases import TrajectoryState
from driver.reports.dropped import FILE, WHY, DroppedLog
from services.trajectories.data_order import DataOrder

ORDER = DataOrder.of_one(0, 4)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


@pytest.fixture
def log(tmp_path):
    log = DroppedLog(tmp_path, ORDER, "sums.jsonl, line {}".format)
    yield log
    log.close_log()


def test_every_end_of_a_group_but_training_has_a_reason():
    assert set(TrajectoryState) - set(WHY) == {TrajectoryState.TRAINED, TrajectoryState.DUPLICATE}


def test_a_dropped_group_is_named_with_its_reason_prompt_and_epoch(tmp_path, log):
    ended = {
        "trained": ["g00000000"],
        "dropped_zero_variance": ["g00000005"],
        "skipped": ["g00000006"],
        "duplicate": ["g00000001"],
    }
    log.write_groups(3, ended)
    equal, skipped = lines(tmp_path)
    assert (equal["step"], equal["group_id"], equal["epoch"]) == (3, "g00000005", 1)
    assert equal["where"] == f"sums.jsonl, line {ORDER.prompt_at(5)[1]}"
    assert equal["why"] == "all its rewards are equal"
    assert skipped["why"] == "data.curriculum skips its prompt for a while"


def test_prompts_that_were_left_out_stay_over_a_resume_from_the_very_beginning(tmp_path, log):
    log.write_prompts([{"why": "80 tokens", "where": "sums.jsonl, line 9"}])
    log.write_groups(1, {"dropped_stale": ["g00000001"]})
    assert log.rewind(-1) == 1
    assert [one["where"] for one in lines(tmp_path)] == ["sums.jsonl, line 9"]
