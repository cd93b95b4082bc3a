"""What counts as a reply of a scorer's process: exactly the expected form, with the right id."""

import json
import math

import pytest

from rollout_worker.rewards.reward_replies import (
    BadReply,
    LoadReply,
    ScoreReply,
    parse_load_reply,
    parse_score_reply,
)


def test_replies_of_the_expected_form_are_read():
    scored = b'{"id": "a", "scorer": "f", "rewards": {"f": 1, "f/strict": 0.5}}'
    assert parse_score_reply(scored, "a", "f") == ScoreReply({"f": 1.0, "f/strict": 0.5}, "")
    failed = b'{"id": "a", "scorer": "f", "error": "no"}'
    assert parse_score_reply(failed, "a", "f") == ScoreReply({}, "no")
    assert parse_load_reply(b'{"id": "a", "loading": "f"}', "a") == LoadReply("loading", "f")
    assert parse_load_reply(b'{"id": "a", "refused": "no"}', "a") == LoadReply("refused", "no")
    assert parse_load_reply(b'{"id": "a", "ready": true}', "a") == LoadReply("ready", "")


def test_an_error_without_a_text_is_still_an_error():
    assert parse_score_reply(b'{"id": "a", "scorer": "f", "error": ""}', "a", "f").error


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
        {"rewards": {"f": 1.0}},
        {"scorer": "g", "rewards": {"g": 1.0}},
        {"scorer": ["f"], "rewards": {"f": 1.0}},
        {"scorer": "f"},
        {"scorer": "f", "rewards": None},
        {"scorer": "f", "rewards": [1.0]},
        {"scorer": "f", "rewards": {}},
        {"scorer": "f", "rewards": {"f/strict": 1.0}},
        {"scorer": "f", "rewards": {"f": 1.0, "g": 1.0}},
        {"scorer": "f", "rewards": {"f": 1.0, "fg": 1.0}},
        {"scorer": "f", "rewards": {"f": "1.0"}},
        {"scorer": "f", "rewards": {"f": True}},
        {"scorer": "f", "rewards": {"f": None}},
        {"scorer": "f", "rewards": {"f": [1.0]}},
        {"scorer": "f", "rewards": {"f": math.inf}},
        {"scorer": "f", "rewards": {"f": math.nan}},
        {"scorer": "f", "rewards": {"f": 10**400}},
        {"scorer": "f", "rewards": {"f": 1e7}},
        {"scorer": "f", "rewards": {"f": 1.0, "f/strict": -math.inf}},
        {"scorer": "f", "error": 1},
        {"scorer": "f", "error": None},
        {"scorer": "f", "error": "no", "rewards": {"f": 1.0}},
        {"scorer": "f", "rewards": {"f": 1.0}, "more": 1},
    ],
)
def test_a_reward_that_is_none_is_refused(fields):
    with pytest.raises(BadReply, match="which is no reply"):
        parse_score_reply(json.dumps({"id": "a", **fields}).encode(), "a", "f")


def test_a_number_that_overflows_is_refused():
    with pytest.raises(BadReply):
        parse_score_reply(b'{"id": "a", "scorer": "f", "rewards": {"f": 1e999}}', "a", "f")


@pytest.mark.parametrize("other", [None, "b", "", 0, ["a"], True])
def test_a_reply_to_another_request_is_refused(other):
    line = json.dumps({"id": other, "scorer": "f", "rewards": {"f": 1.0}}).encode()
    with pytest.raises(BadReply, match="answers another request"):
        parse_score_reply(line, "a", "f")
    with pytest.raises(BadReply, match="answers another request"):
        parse_load_reply(json.dumps({"id": other, "ready": True}).encode(), "a")


@pytest.mark.parametrize(
    "fields",
    [
        {"loading": 1},
        {"refused": None},
        {"ready": 1},
        {"ready": False},
        {"ready": True, "loading": "f"},
        {"scorer": "f", "rewards": {"f": 1.0}},
    ],
)
def test_a_setup_is_answered_by_its_own_replies_only(fields):
    with pytest.raises(BadReply, match="which is no reply"):
        parse_load_reply(json.dumps({"id": "a", **fields}).encode(), "a")
