import contextlib
import json
import math
import re
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trajectories.data_order import DataOrder, OrderedSource
from services.trajectories.group_buffer import BufferFull, GroupBuffer, NotStored
from services.trajectories.group_check import check_group
from services.trajectories.receipts import NotOpen, StaleGroup, UnknownReceipt
from services.wire.messages import PushOutcome
from tests.deadlines import HANG_S
from tests.services.group_rules import group_rules

RUN_ID = "run-a"
DIGEST = "d" * 64
ACCEPTED, DUPLICATE = PushOutcome.ACCEPTED, PushOutcome.DUPLICATE


@pytest.fixture
def buffer(make_buffer):
    buffer = make_buffer()
    buffer.issue(0, DIGEST)
    return buffer


def test_g05_group_trains_once_however_often_it_is_pushed(buffer, make_group):
    trained = []
    outcomes = [buffer.put_group(make_group("g1")), buffer.put_group(make_group("g1", attempt=1))]
    trained += buffer.take_groups(["g1"], 1).groups
    outcomes += [buffer.put_group(make_group("g1", attempt=2)), buffer.put_group(make_group("g2"))]
    trained += buffer.take_groups(["g2"], 1).groups
    outcomes.append(buffer.put_group(make_group("g2")))
    assert outcomes == [ACCEPTED, DUPLICATE, DUPLICATE, ACCEPTED, DUPLICATE]
    assert [(group.group_id, group.attempt) for group in trained] == [("g1", 0), ("g2", 0)]
    counts = buffer.counts()
    assert (counts.received, counts.accepted, counts.duplicate, counts.taken) == (5, 2, 3, 2)


def test_repeat_is_a_duplicate_even_when_its_version_is_long_stale(buffer, make_group):
    buffer.put_group(make_group())
    buffer.take_groups(["g1"], 1)
    buffer.issue(9, "e" * 64)
    assert buffer.put_group(make_group()) is DUPLICATE


def test_r07_age_counts_when_taken(make_buffer, make_group, cases):
    case = cases("lifecycle")["R07"]
    limit, learner_version = case["input"]["max_lag"], case["input"]["learner_version"]
    oldest: dict[str, int] = {}
    for trajectory in case["input"]["trajectories"]:
        group = trajectory["group"]
        oldest[group] = min(oldest.get(group, learner_version), trajectory["version"])
    buffer = make_buffer(max_staleness=limit)
    for version in range(5, 8):
        buffer.issue(version, f"digest-{version}")
    pushed = {
        group_id: make_group(group_id, policy_version=version, weight_digest=f"digest-{version}")
        for group_id, version in oldest.items()
    }
    assert all(buffer.put_group(group) is ACCEPTED for group in pushed.values())
    buffer.issue(learner_version, "digest-8")
    taken = buffer.take_groups(list(pushed), 1)
    expected = case["expected"]
    assert [group.group_id for group in taken.groups] == expected["used_groups"]
    assert [group.group_id for group in taken.dropped_stale] == expected["dropped_stale_groups"]
    lags = {group.group_id: taken.policy_version - group.policy_version for group in taken.groups}
    assert lags == expected["lags_logged"]
    assert taken.groups[0] is pushed["p1"]  # logprobs as recorded, untouched
    counts = buffer.counts()
    assert (counts.taken, counts.dropped_stale, counts.waiting) == (2, 1, 0)
    assert buffer.put_group(pushed["p2"]) is DUPLICATE


def test_group_too_old_at_the_door_is_refused_and_may_come_again_fresh(buffer, make_group):
    buffer.issue(1, "e" * 64)
    with pytest.raises(StaleGroup, match="under policy version 0; the current one is 1 and max_s"):
        buffer.put_group(make_group())
    fresh = make_group(attempt=1, policy_version=1, weight_digest="e" * 64)
    assert buffer.put_group(fresh) is ACCEPTED
    assert buffer.counts().stale == 1


@pytest.mark.parametrize(
    "changes", [{"weight_digest": "e" * 64}, {"policy_version": 1}, {"weight_digest": ""}]
)
def test_receipt_that_was_not_issued_is_refused(buffer, make_group, changes):
    with pytest.raises(UnknownReceipt, match="from 'rollout-0' names weight digest"):
        buffer.put_group(make_group(**changes))
    assert buffer.counts().unknown_receipt == 1


def test_nothing_is_accepted_before_a_version_is_issued(make_buffer, make_group):
    buffer = make_buffer()
    with pytest.raises(NotOpen, match="before the learner has a policy"):
        buffer.put_group(make_group())
    assert buffer.counts().not_open == 1


def test_issued_versions_must_rise(buffer):
    with pytest.raises(ValueError, match="got 0 after 0"):
        buffer.issue(0, DIGEST)


@pytest.mark.parametrize(
    "message, changes",
    [
        ("of run 'run-b', not 'run-a'", {"run_id": "run-b"}),
        ("group_id must not be empty", {"group_id": ""}),
        ("attempt must be at least 0, got -1", {"attempt": -1}),
        ("prompt_id must be at least 0", {"prompt_id": -1}),
        ("epoch must be at least 0", {"epoch": -2}),
        ("policy_version must be at least 0", {"policy_version": -1}),
        ("prompt_token_ids must be int32", {"prompt_token_ids": np.zeros(0, np.int32)}),
        ("prompt_token_ids must be int32", {"prompt_token_ids": np.zeros(2, np.int64)}),
        ("prompt_token_ids must be at least 0", {"prompt_token_ids": np.array([-1], np.int32)}),
        ("has 2 completions, .* got 0: \\[\\]", {"completions": ()}),
        ("got 'decoding': 1.0", {"phase_s": {"decoding": 1.0}}),
        ("got 'decode': nan", {"phase_s": {"decode": math.nan}}),
        ("got 'decode': -1.0", {"phase_s": {"decode": -1.0}}),
    ],
)
def test_malformed_group_is_refused_with_value_and_rule(buffer, make_group, message, changes):
    with pytest.raises(ValueError, match=message):
        buffer.put_group(make_group(**changes))
    counts = buffer.counts()
    assert (counts.malformed, counts.waiting) == (1, 0)


def logprobs(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    "message, changes",
    [
        ("token_ids must be int32", {"token_ids": np.zeros(0, np.int32)}),
        ("token_ids must be int32", {"token_ids": np.zeros((3, 1), np.int32)}),
        ("token_ids must be at least 0, got -7", {"token_ids": np.array([1, -7, 2], np.int32)}),
        (
            "each of the 3 token_ids that were sampled, got float32",
            {"behavior_logprobs": logprobs(-1, -1)},
        ),
        (
            "each of the 3 token_ids that were sampled, got float64",
            {"behavior_logprobs": -np.ones(3)},
        ),
        ("logprob of token 1 is nan", {"behavior_logprobs": logprobs(-1, math.nan, -1)}),
        ("logprob of token 2 is -inf", {"behavior_logprobs": logprobs(-1, -1, -math.inf)}),
        ("at most 0, got 0.25", {"behavior_logprobs": logprobs(-1, 0.25, -1)}),
        ("at most 0, got inf", {"behavior_logprobs": logprobs(-1, math.inf, -1)}),
        ("total_reward must be finite", {"total_reward": math.nan}),
        ("total_reward must be finite", {"total_reward": math.inf}),
        ("total_reward must be finite", {"reward_error": "gsm8k_answer: timed out"}),
        ("reward 'x' is nan and reward_error is empty", {"rewards": {"x": math.nan}}),
    ],
)
def test_malformed_completion_is_refused(buffer, make_group, make_completion, message, changes):
    group = make_group(completions=(make_completion(0), make_completion(1, **changes)))
    with pytest.raises(ValueError, match=f"sample 1: .*{message}"):
        buffer.put_group(group)


@pytest.mark.parametrize("indices", [(0,), (0, 1, 2), (0, 0), (-1, 0), (0, 4), (1, 2), (0, 1, 1)])
def test_a_group_that_is_not_whole_is_refused_and_not_stored(make_group, make_completion, indices):
    stored = []
    buffer = stored_buffer(stored.append)
    message = rf"has 2 completions, .*0 to 1 once; got {len(indices)}: {re.escape(str([*indices]))}"
    with pytest.raises(ValueError, match=message):
        buffer.put_group(make_group(completions=tuple(map(make_completion, indices))))
    assert not stored and buffer.counts().malformed == 1
    assert buffer.put_group(make_group()) is ACCEPTED


@pytest.mark.parametrize(
    "message, changes",
    [
        ("below the vocabulary's 369, got 1000000", {"prompt_token_ids": [1, 10**6]}),
        ("below the vocabulary's 369, got 369", {"token_ids": [369]}),
        ("may have 3 tokens in this run, got 4", {"prompt_token_ids": [1, 2, 3, 4]}),
        ("may have 5 tokens in this run, got 6", {"token_ids": [1, 2, 3, 4, 5, 6]}),
        ("a drawn token is at least -80, got -1.0", {"logprobs": [-1.0, -1e30, -1.0]}),
        ("made from its index, such as g00000012", {"group_id": "g12"}),
        ("made from its index", {"group_id": "g00000012 "}),
        ("made from its index", {"group_id": "g" + "9" * 40}),
        ("with 5 prompts its epoch is 2, got 0", {"group_id": "g00000012"}),
        ("last one is g00008191", {"group_id": "g00008192", "epoch": 1638}),
        ("last one is g00008191", {"group_id": "g999999999", "epoch": 199999999}),
    ],
)
def test_what_later_use_relies_on_is_checked_before_anything_is_stored_R11(
    make_group, make_completion, message, changes
):
    stored = []
    lengths = dict(max_prompt_tokens=3, max_completion_tokens=5)
    buffer = GroupBuffer(
        group_rules(RUN_ID, order=DataOrder.of_one(0, 5), **lengths),
        capacity_groups=8,
        capacity_bytes=2**20,
        max_staleness=0,
        store=stored.append,
    )
    buffer.issue(0, DIGEST)
    ids = changes.pop("token_ids", [11, 12, 2])
    completion = make_completion(
        1,
        token_ids=np.array(ids, np.int32),
        behavior_logprobs=logprobs(*changes.pop("logprobs", [-1.0] * len(ids))),
    )
    if "prompt_token_ids" in changes:
        changes["prompt_token_ids"] = np.array(changes["prompt_token_ids"], np.int32)
    fields = {"group_id": "g00000000"} | changes
    with pytest.raises(ValueError, match=message):
        buffer.put_group(make_group(completions=(make_completion(0), completion), **fields))
    assert not stored and buffer.counts().malformed == 1
    assert buffer.put_group(make_group("g00008191", epoch=1638)) is ACCEPTED


def test_records_are_bounded_one_by_one(make_group, make_completion):
    """Of a prompt of 3 tokens and a completion of 5 at most, whatever the episode has in all."""

    def episode(*segments):
        return make_completion(
            1,
            token_ids=np.full(sum(segments), 11, np.int32),
            behavior_logprobs=logprobs(*[-1.0] * sum(segments[::2])),
            segment_tokens=segments,
            record_starts=(1,),
        )

    rules = group_rules(RUN_ID, max_prompt_tokens=3, max_completion_tokens=5)

    def check(completion):
        prompt = np.array([1, 2, 3], np.int32)
        group = make_group(prompt_token_ids=prompt, completions=(make_completion(0), completion))
        check_group(group, rules)

    check(episode(5, 6, 2))
    with pytest.raises(ValueError, match="sample 1: record 0 may have 8 tokens, .* 5, got 9"):
        check(episode(6, 5, 2))
    with pytest.raises(ValueError, match="sample 1: record 1 may have 8 tokens, .* 5, got 9"):
        check(episode(1, 6, 3))


def test_groups_may_lie_as_far_beyond_what_was_restored_as_beyond_what_was_used(make_group):
    restored = make_group("g00000500", epoch=100)
    buffer = GroupBuffer(
        group_rules(RUN_ID, order=DataOrder.of_one(0, 5)),
        capacity_groups=8,
        capacity_bytes=2**20,
        max_staleness=0,
    )
    buffer.restore_accepted([restored], {0: DIGEST}, 0)
    with pytest.raises(ValueError, match="the last one is g00008692"):
        buffer.put_group(make_group("g00008693", epoch=1738))
    assert buffer.put_group(make_group("g00008692", epoch=1738)) is ACCEPTED


def test_the_completions_of_a_group_may_come_in_any_order(buffer, make_group, make_completion):
    turned = (make_completion(1), make_completion(0))
    assert buffer.put_group(make_group(completions=turned)) is ACCEPTED


def test_a_message_about_very_many_completions_is_short(buffer, make_group, make_completion):
    with pytest.raises(ValueError, match="got 5000: ") as refusal:
        buffer.put_group(make_group(completions=tuple(map(make_completion, range(5000)))))
    assert len(str(refusal.value)) < 400


def test_completion_with_a_reward_error_is_welcome(buffer, make_group, make_completion):
    failed = make_completion(
        1, reward_error="x: raised", total_reward=math.nan, rewards={"x": math.nan}
    )
    assert buffer.put_group(make_group(completions=(make_completion(0), failed))) is ACCEPTED


def test_rounding_above_zero_is_no_fault(buffer, make_group, make_completion):
    rounded = make_completion(behavior_logprobs=logprobs(0, 1e-6, -0.0))
    assert buffer.put_group(make_group(completions=(rounded, make_completion(1)))) is ACCEPTED


def test_full_buffer_refuses_until_groups_are_taken(make_buffer, make_group):
    buffer = make_buffer(capacity_groups=1)
    buffer.issue(0, DIGEST)
    buffer.put_group(make_group("g1"))
    with pytest.raises(BufferFull, match="1 of 1 groups"):
        buffer.put_group(make_group("g2"))
    assert buffer.put_group(make_group("g1")) is DUPLICATE
    buffer.take_groups(["g1"], 1)
    assert buffer.put_group(make_group("g2")) is ACCEPTED
    assert buffer.counts().full == 1


def test_capacity_in_bytes(make_buffer, make_group):
    nbytes = 2 * 4 + 2 * 3 * 8  # prompt ids, and ids with logprobs of two completions
    buffer = make_buffer(capacity_bytes=2 * nbytes - 1)
    buffer.issue(0, DIGEST)
    buffer.put_group(make_group("g1"))
    assert buffer.counts().waiting_bytes == nbytes
    with pytest.raises(BufferFull, match=f"{nbytes} of {2 * nbytes - 1} bytes wait"):
        buffer.put_group(make_group("g2"))
    tiny = make_buffer(capacity_bytes=nbytes - 1)
    tiny.issue(0, DIGEST)
    with pytest.raises(ValueError, match=f"has {nbytes} bytes, and the whole buffer {nbytes - 1}"):
        tiny.put_group(make_group("g1"))


def test_take_keeps_the_order_asked_for(buffer, make_group):
    for group_id in ("a", "b", "c"):
        buffer.put_group(make_group(group_id))
    assert [group.group_id for group in buffer.take_groups(["c", "a"], 1).groups] == ["c", "a"]
    assert buffer.counts().waiting == 1


def test_take_waits_for_the_last_group(buffer, make_group):
    buffer.put_group(make_group("a"))
    later = threading.Timer(0.05, lambda: buffer.put_group(make_group("b")))
    later.start()
    assert len(buffer.take_groups(["a", "b"], 10).groups) == 2
    later.join()


def test_take_that_times_out_names_the_missing_and_consumes_nothing(buffer, make_group):
    buffer.put_group(make_group("a"))
    with pytest.raises(TimeoutError, match=r"waited 0.01 s for 3 groups; 2 .*\['b', 'c'\]"):
        buffer.take_groups(["a", "b", "c"], 0.01)
    assert len(buffer.take_groups(["a"], 0).groups) == 1


def test_take_of_a_group_that_is_gone_fails_at_once(buffer, make_group):
    buffer.put_group(make_group("a"))
    buffer.take_groups(["a"], 1)
    with pytest.raises(ValueError, match=r"\['a'\] were taken"):
        buffer.take_groups(["a"], 60)
    with pytest.raises(ValueError, match="must differ"):
        buffer.take_groups(["b", "b"], 60)


def test_take_ends_when_its_group_is_given_up(buffer):
    later = threading.Timer(0.05, lambda: buffer.forget(["a"]))
    later.start()
    with pytest.raises(ValueError, match=r"\['a'\] were taken or forgotten"):
        buffer.take_groups(["a"], 60)
    later.join()


def test_what_grew_too_old_while_it_waited_is_given_away_apart(make_buffer, make_group):
    buffer = make_buffer(max_staleness=1)
    buffer.issue(0, "d0")
    buffer.issue(1, "d1")
    for group_id, version in (("a", 1), ("b", 0), ("c", 1), ("d", 1)):
        buffer.put_group(make_group(group_id, policy_version=version, weight_digest=f"d{version}"))
    buffer.issue(2, "d2")
    taken = buffer.take_groups(["a", "b", "c"], 0.0)
    assert [group.group_id for group in taken.groups] == ["a", "c"]
    assert [group.group_id for group in taken.dropped_stale] == ["b"]
    assert [report.group_id for report in buffer.reports()] == ["d"]


def test_forgotten_group_is_dropped_and_its_late_arrival_a_duplicate(buffer, make_group):
    buffer.put_group(make_group("a"))
    buffer.forget(["a", "b"])
    assert buffer.put_group(make_group("b")) is DUPLICATE
    counts = buffer.counts()
    assert (counts.waiting, counts.waiting_bytes, counts.forgotten) == (0, 0, 1)


def test_state_survives_json_and_waiting_groups_are_taken_over(buffer, make_buffer, make_group):
    for group_id in ("a", "b"):
        buffer.put_group(make_group(group_id))
    held = buffer.held()
    buffer.take_groups(["a"], 1)
    state = json.loads(json.dumps(buffer.state()))
    resumed = make_buffer(capacity_groups=1)
    resumed.restore(state)
    resumed.restore_accepted([*held.values(), make_group("c")], {0: DIGEST}, policy_version=0)
    assert [report.group_id for report in resumed.reports()] == ["b", "c"]  # beyond its bound
    for group_id in ("a", "b", "c"):
        assert resumed.put_group(make_group(group_id)) is DUPLICATE
    with pytest.raises(BufferFull, match="2 of 1 groups"):
        resumed.put_group(make_group("d"))
    counts = resumed.counts()
    assert (counts.restored, counts.waiting) == (2, 2)


def stored_buffer(store, **sizes):
    sizes = {"capacity_groups": 2, "capacity_bytes": 2**20, "max_staleness": 0} | sizes
    buffer = GroupBuffer(group_rules(RUN_ID), store=store, **sizes)
    buffer.issue(0, DIGEST)
    return buffer


class SlowDisk:
    """Holds whoever stores until it is let go; fails for those named."""

    def __init__(self, *fails):
        self.fails = fails
        self.stored = []
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, group):
        self.reached.set()
        assert self.go.wait(HANG_S)
        if group.attempt in self.fails:
            raise OSError(28, "No space left on device")
        self.stored.append((group.group_id, group.attempt))


def started(function, *args):
    """A thread that calls it, and the list that gets what comes of it."""
    results = []

    def call():
        try:
            results.append(function(*args))
        except NotStored as refusal:
            results.append(refusal)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, results


def test_a_group_counts_as_accepted_only_when_it_is_stored(make_group):
    disk = SlowDisk()
    buffer = stored_buffer(disk)
    thread, results = started(buffer.put_group, make_group("a"))
    assert disk.reached.wait(HANG_S)
    # Readers answer meanwhile, and nobody has the group yet; but what is on its way is held.
    counts = buffer.counts()
    assert (counts.received, counts.accepted, counts.waiting, buffer.reports()) == (0, 0, 0, [])
    assert list(buffer.held()) == ["a"]
    with pytest.raises(TimeoutError):
        buffer.take_groups(["a"], 0.01)
    disk.go.set()
    thread.join(HANG_S)
    assert results == [ACCEPTED] and disk.stored == [("a", 0)]
    assert len(buffer.take_groups(["a"], 0).groups) == 1


@pytest.mark.parametrize("fails, expected", [((), DUPLICATE), ((0,), ACCEPTED)])
def test_a_repeated_push_receives_the_result_of_the_first_that_is_being_stored(
    make_group, fails, expected
):
    """A duplicate if it was stored; else it is the one that counts."""
    disk = SlowDisk(*fails)
    buffer = stored_buffer(disk)
    first, of_first = started(buffer.put_group, make_group("a"))
    assert disk.reached.wait(HANG_S)
    second, of_second = started(buffer.put_group, make_group("a", attempt=1))
    header, of_header = started(buffer.put_duplicate, RUN_ID, "a")
    second.join(0.05)
    assert of_second == of_header == [], "answered before anybody could know"
    disk.go.set()
    for thread in (first, second, header):
        thread.join(HANG_S)
    assert of_second == [expected]
    if fails:
        assert isinstance(of_first[0], NotStored)
        assert buffer.counts().not_stored == 1
    assert buffer.counts().accepted == 1 and buffer.counts().waiting == 1


def test_room_is_held_for_what_is_being_stored(make_group):
    disk = SlowDisk(0)
    buffer = stored_buffer(disk, capacity_groups=1)
    thread, _ = started(buffer.put_group, make_group("a"))
    assert disk.reached.wait(HANG_S)
    with pytest.raises(BufferFull, match="1 of 1 groups"):
        buffer.put_group(make_group("b", attempt=1))
    disk.go.set()
    thread.join(HANG_S)
    assert buffer.put_group(make_group("b", attempt=1)) is ACCEPTED, "the failed one left its room"


def test_a_group_given_up_while_it_is_stored_does_not_wait(make_group):
    disk = SlowDisk()
    buffer = stored_buffer(disk)
    thread, results = started(buffer.put_group, make_group("a"))
    assert disk.reached.wait(HANG_S)
    buffer.forget(["a"])
    disk.go.set()
    thread.join(HANG_S)
    counts = buffer.counts()
    assert results == [ACCEPTED]
    assert (counts.accepted, counts.forgotten, counts.waiting, counts.waiting_bytes) == (1, 1, 0, 0)


def test_staleness_counts_from_the_learner_not_from_what_workers_can_have(make_buffer, make_group):
    buffer = make_buffer(max_staleness=1)
    buffer.issue(0, DIGEST)
    buffer.put_group(make_group("a"))
    buffer.advance(2)  # versions 1 and 2 are on their way out
    with pytest.raises(StaleGroup, match="the current one is 2 and max_staleness 1"):
        buffer.put_group(make_group("b"))
    taken = buffer.take_groups(["a"], 0)
    assert (taken.groups, len(taken.dropped_stale), taken.policy_version) == ((), 1, 2)
    assert buffer.current_version == 0


def restarted(make_buffer, make_group, **sizes):
    """At version 1, with groups of 1, 2 and 3, all of which the process before had issued."""
    buffer = make_buffer(max_staleness=1, **sizes)
    groups = [
        make_group(f"of-{version}", policy_version=version, weight_digest=f"d{version}")
        for version in (3, 1, 2)
    ]
    buffer.restore_accepted(groups, {1: "d1", 2: "d2", 3: "d3"}, policy_version=1)
    return buffer


def test_groups_of_versions_to_come_can_be_taken_when_those_are_reached(make_buffer, make_group):
    buffer = restarted(make_buffer, make_group)
    assert buffer.issue(1, "d1") == ()
    assert buffer.put_group(make_group("new", policy_version=3, weight_digest="d3")) is ACCEPTED
    with pytest.raises(TimeoutError, match=r"\['of-2'\]"):
        buffer.take_groups(["of-1", "of-2"], 0.01)
    assert buffer.take_groups(["of-1"], 0.0).groups
    buffer.advance(2)
    assert buffer.take_groups(["of-2"], 0.0).groups
    assert buffer.issue(2, "d2") == ()
    with pytest.raises(TimeoutError, match=r"\['of-3', 'new'\]"):
        buffer.take_groups(["of-3", "new"], 0.0)
    buffer.advance(3)
    assert len(buffer.take_groups(["of-3", "new"], 0.0).groups) == 2


def test_groups_of_a_version_that_came_out_different_are_disowned(make_buffer, make_group):
    buffer = restarted(make_buffer, make_group)
    buffer.issue(1, "d1")
    assert buffer.issue(2, "other") == ("of-2",)
    assert buffer.revoke(3) == ("of-3",)
    with pytest.raises(UnknownReceipt):
        buffer.put_group(make_group("new", policy_version=3, weight_digest="d3"))
    assert (
        buffer.put_group(make_group("of-2", policy_version=2, weight_digest="other")) is DUPLICATE
    )
    counts = buffer.counts()
    assert (counts.restored, counts.disowned, counts.waiting) == (3, 2, 1)


def test_reports_sum_up_what_waits_in_order_of_arrival(buffer, make_group, make_completion):
    failed = make_completion(1, reward_error="x: raised", total_reward=math.nan)
    buffer.put_group(make_group("b", attempt=2, completions=(make_completion(0), failed)))
    buffer.put_group(make_group("a"))
    first, second = buffer.reports()
    assert (first.group_id, first.attempt, first.policy_version) == ("b", 2, 0)
    assert (first.scored, first.reward_sum, first.reward_error) == (1, 1.0, "x: raised")
    assert (second.scored, second.zero_variance, second.completion_tokens) == (2, True, 6)
    assert [report.group_id for report in buffer.reports(["a", "absent"])] == ["a"]


@pytest.mark.parametrize(
    "sizes", [{"capacity_groups": 0}, {"capacity_bytes": 0}, {"max_staleness": -1}]
)
def test_sizes_that_cannot_work_are_refused(make_buffer, sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))}="):
        make_buffer(**sizes)


PUSH = st.tuples(st.just("put"), st.sampled_from("abcde"), st.integers(0, 4))
EVENTS = st.lists(
    st.one_of(
        PUSH,
        PUSH,
        st.tuples(st.just("issue"), st.just(""), st.just(0)),
        st.tuples(st.just("take"), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("forget"), st.sampled_from("abcde"), st.just(0)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_every_push_and_every_group_ends_in_exactly_one_state(make_group, events):
    buffer = GroupBuffer(
        group_rules(RUN_ID), capacity_groups=2, capacity_bytes=2**20, max_staleness=1
    )
    buffer.issue(0, "d0")
    given_away = []
    for action, group_id, number in events:
        current = buffer.current_version
        if action == "issue":
            buffer.issue(current + 1, f"d{current + 1}")
        elif action == "forget":
            buffer.forget([group_id])
        elif action == "take":
            waiting = [report.group_id for report in buffer.reports()]
            taken = buffer.take_groups(waiting[:number], 0.0)
            assert all(current - group.policy_version <= 1 for group in taken.groups)
            given_away += [group.group_id for group in taken.groups + taken.dropped_stale]
        else:
            group = make_group(group_id, policy_version=number, weight_digest=f"d{number}")
            with contextlib.suppress(StaleGroup, UnknownReceipt, BufferFull, NotOpen):
                buffer.put_group(group)
    assert len(set(given_away)) == len(given_away)
    now = buffer.counts()
    assert now.received == (
        now.accepted + now.duplicate + now.stale + now.malformed + now.unknown_receipt + now.full
    )
    ends = now.taken + now.dropped_stale + now.forgotten + now.disowned + now.waiting
    assert now.accepted + now.restored == ends
    assert now.waiting <= 2 and (now.waiting_bytes > 0) == (now.waiting > 0)


def test_the_epoch_of_a_group_is_that_of_its_source(make_group):
    order = DataOrder(
        0,
        (
            OrderedSource(name="many", count=50, weight=1),
            OrderedSource(name="few", count=2, weight=1),
        ),
    )
    buffer = GroupBuffer(
        group_rules(RUN_ID, order=order),
        capacity_groups=8,
        capacity_bytes=2**20,
        max_staleness=0,
    )
    buffer.issue(0, DIGEST)
    assert buffer.put_group(make_group("g00000008", epoch=0)) is ACCEPTED
    with pytest.raises(ValueError, match="with 2 prompts of its source few its epoch is 2, got 0"):
        buffer.put_group(make_group("g00000009", epoch=0))
    assert buffer.put_group(make_group("g00000009", epoch=2)) is ACCEPTED
