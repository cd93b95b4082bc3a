"""What counts as a reply of a scorer's process: exactly the expected form, with the right id."""

import json
import math

import pytest

from rollout_worker.rewards.processes.reward_replies import (
    BadReply,
    LoadReply,
    ScoreReply,
    parse_load_reply,
    parse_score_reply,
    read_id,
)
from rollout_worker.rewards.scorers import ScorerKind
from rollout_worker.rewards.spending import Spending


def test_replies_of_the_expected_form_are_read():
    scored = b'{"id": "a", "scorer": "f", "rewards": [{"f": 1, "f/strict": 0.5}]}'
    assert parse_score_reply(scored, "a", "f") == ScoreReply(({"f": 1.0, "f/strict": 0.5},), "")
    failed = b'{"id": "a", "scorer": "f", "error": "no", "late": false, "doubtful": true}'
    assert parse_score_reply(failed, "a", "f") == ScoreReply((), "no", doubtful=True)
    late = b'{"id": "a", "scorer": "f", "error": "no", "late": true, "doubtful": false}'
    assert parse_score_reply(late, "a", "f") == ScoreReply((), "no", late=True)
    group = b'{"id": "a", "scorer": "f", "rewards": [{"f": 2}, {"f": 1}]}'
    assert parse_score_reply(group, "a", "f", 2).rewards == ({"f": 2.0}, {"f": 1.0})
    assert parse_load_reply(b'{"id": "a", "loading": "f"}', "a") == LoadReply("loading", "f")
    assert parse_load_reply(b'{"id": "a", "refused": "no"}', "a") == LoadReply("refused", "no")
    ready = (
        b'{"id": "a", "ready": {"f": {"is_async": true, "is_group": false, "tools": [{"a": 1}], '
        b'"wants_tokens": true}}}'
    )
    kinds = {"f": ScorerKind(is_async=True, is_group=False, tools=({"a": 1},), wants_tokens=True)}
    assert parse_load_reply(ready, "a") == LoadReply("ready", "", kinds)


SPENT = {
    "requests": 2,
    "failed_requests": 1,
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "cost": 0.5,
}


def test_notes_and_what_was_spent_come_with_a_reply():
    fields = {"scorer": "f", "rewards": [{"f": 1.0}, {"f": 0.0}], "notes": ["good", ""]}
    line = json.dumps({"id": "a", **fields, "spent": SPENT}).encode()
    reply = parse_score_reply(line, "a", "f", 2)
    assert reply.notes == ("good", "") and reply.spent == Spending(**SPENT)
    failed = {"scorer": "f", "error": "no", "late": False, "doubtful": False, "spent": SPENT}
    line = json.dumps({"id": "a", **failed}).encode()
    assert parse_score_reply(line, "a", "f").spent == Spending(**SPENT)


@pytest.mark.parametrize(
    "more",
    [
        {"notes": "good"},
        {"notes": []},
        {"notes": [1]},
        {"notes": ["x" * 2001]},
        {"spent": 1.0},
        {"spent": {}},
        {"spent": SPENT | {"requests": -1}},
        {"spent": SPENT | {"requests": 1.5}},
        {"spent": SPENT | {"cost": math.inf}},
        {"spent": SPENT | {"more": 1}},
    ],
)
def test_notes_and_spending_of_another_form_are_refused(more):
    line = json.dumps({"id": "a", "scorer": "f", "rewards": [{"f": 1.0}], **more}).encode()
    with pytest.raises(BadReply):
        parse_score_reply(line, "a", "f")


def test_an_error_without_a_text_is_still_an_error():
    line = b'{"id": "a", "scorer": "f", "error": "", "late": false, "doubtful": false}'
    assert parse_score_reply(line, "a", "f").error


NO_REPLIES = [
    b"",
    b"noise",
    b"\xff",
    b"1",
    b"null",
    b"[]",
    b'"error"',
    b'["error", "rewards"]',
    b"{}",
    b"[" * 100_000,
    b"9" * 100_000,
    b'{"id": "a"',
]


@pytest.mark.parametrize("line", NO_REPLIES)
def test_any_other_line_is_refused(line):
    with pytest.raises(BadReply):
        parse_score_reply(line, "a", "f")
    with pytest.raises(BadReply):
        parse_load_reply(line, "a")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rewards": [{"f": 1.0}]},
        {"scorer": "g", "rewards": [{"g": 1.0}]},
        {"scorer": ["f"], "rewards": [{"f": 1.0}]},
        {"scorer": "f"},
        {"scorer": "f", "rewards": None},
        {"scorer": "f", "rewards": [1.0]},
        {"scorer": "f", "rewards": {"f": 1.0}},
        {"scorer": "f", "rewards": []},
        {"scorer": "f", "rewards": [{"f": 1.0}, {"f": 1.0}]},
        {"scorer": "f", "error": "no"},
        {"scorer": "f", "error": "no", "late": 0, "doubtful": False},
        {"scorer": "f", "error": "no", "late": False, "doubtful": False, "more": 1},
        {"scorer": "f", "rewards": [{}]},
        {"scorer": "f", "rewards": [{"f/strict": 1.0}]},
        {"scorer": "f", "rewards": [{"f": 1.0, "g": 1.0}]},
        {"scorer": "f", "rewards": [{"f": 1.0, "fg": 1.0}]},
        {"scorer": "f", "rewards": [{"f": "1.0"}]},
        {"scorer": "f", "rewards": [{"f": True}]},
        {"scorer": "f", "rewards": [{"f": None}]},
        {"scorer": "f", "rewards": [{"f": [1.0]}]},
        {"scorer": "f", "rewards": [{"f": math.inf}]},
        {"scorer": "f", "rewards": [{"f": math.nan}]},
        {"scorer": "f", "rewards": [{"f": 10**400}]},
        {"scorer": "f", "rewards": [{"f": 1e7}]},
        {"scorer": "f", "rewards": [{"f": 1.0, "f/strict": -math.inf}]},
        {"scorer": "f", "error": 1},
        {"scorer": "f", "error": None},
        {"scorer": "f", "error": "no", "rewards": [{"f": 1.0}]},
        {"scorer": "f", "rewards": [{"f": 1.0}], "more": 1},
    ],
)
def test_a_reward_that_is_none_is_refused(fields):
    with pytest.raises(BadReply, match="which is no reply"):
        parse_score_reply(json.dumps({"id": "a", **fields}).encode(), "a", "f")


def test_a_number_that_overflows_is_refused():
    with pytest.raises(BadReply):
        parse_score_reply(b'{"id": "a", "scorer": "f", "rewards": [{"f": 1e999}]}', "a", "f")


@pytest.mark.parametrize("other", [None, "b", "", 0, ["a"], True])
def test_a_reply_to_another_request_is_refused_R1(other):
    line = json.dumps({"id": other, "scorer": "f", "rewards": [{"f": 1.0}]}).encode()
    with pytest.raises(BadReply, match="answers another request"):
        parse_score_reply(line, "a", "f")
    with pytest.raises(BadReply, match="answers another request"):
        parse_load_reply(json.dumps({"id": other, "ready": {}}).encode(), "a")


@pytest.mark.parametrize(
    "fields",
    [
        {"loading": 1},
        {"refused": None},
        {"ready": 1},
        {"ready": False},
        {"ready": True},
        {"ready": {}, "loading": "f"},
        {"ready": {"f": {"is_async": True}}},
        {"ready": {"f": {"is_async": True, "is_group": 1, "tools": []}}},
        {"ready": {"f": {"is_async": True, "is_group": False, "tools": [1]}}},
        {"ready": {"f": {"is_async": True, "is_group": False, "tools": [], "more": True}}},
        {"ready": {"f": None}},
        {"scorer": "f", "rewards": {"f": 1.0}},
    ],
)
def test_a_setup_is_answered_by_its_own_replies_only(fields):
    with pytest.raises(BadReply, match="which is no reply"):
        parse_load_reply(json.dumps({"id": "a", **fields}).encode(), "a")


@pytest.mark.parametrize("line", NO_REPLIES[:-4])
def test_the_id_of_a_line_is_read_or_the_line_refused(line):
    assert read_id(b'{"id": "a"}') == "a"
    assert read_id(b"{}") == read_id(b'{"id": 1}') == ""
    with pytest.raises(BadReply):
        read_id(line)
