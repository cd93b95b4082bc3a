"""Pushes that must not be taken, over real sockets; and a fuzzer that notices one that is."""

import pytest

from services.trajectories.group_buffer import GroupBuffer
from services.trajectories.receipts import Receipts
from tests.services.group_rules import group_rules
from tests.services.trajectories import push_kinds
from tests.services.trajectories.push_fuzz import run_fuzz, table

pytestmark = pytest.mark.slow


def test_every_bad_push_is_refused_with_its_status_and_none_is_taken():
    report = run_fuzz(2000, seed=1)
    assert report.wrong == []
    assert {kind for kind, _ in report.answers} >= {
        *("duplicate", "stale", "forged receipt", "oversized group"),
        *("malformed group", "malformed completion", "malformed field", "malformed push"),
        "no message of the protocol",
    }
    assert sum(report.answers.values()) == 2000
    counts = report.counts
    assert (counts.accepted, counts.taken, counts.waiting, counts.waiting_bytes) == (1, 1, 0, 0)
    assert counts.duplicate == report.answers["duplicate", "OK"]
    assert counts.stale == report.answers["stale", "FAILED_PRECONDITION"]
    assert counts.unknown_receipt == report.answers["forged receipt", "NOT_FOUND"]
    assert report.alive and report.passed
    assert list(table(report))[-1].startswith(
        "push_fuzz: messages 2000, wrong status 0, accepted 0, in the buffer 0, server alive"
    )


def test_a_message_above_the_cap_is_refused(monkeypatch):
    monkeypatch.setattr(
        push_kinds, "KINDS", {"oversized message": push_kinds.KINDS["oversized message"]}
    )
    report = run_fuzz(4, seed=0)
    assert report.passed and report.answers == {("oversized message", "RESOURCE_EXHAUSTED"): 4}


@pytest.mark.parametrize("owner, rule", [(Receipts, "check_group"), (GroupBuffer, "_knows")])
def test_a_server_that_breaks_a_rule_is_noticed(monkeypatch, owner, rule):
    monkeypatch.setattr(owner, rule, lambda self, group: False)
    report = run_fuzz(
        200,
        seed=0,
        make_buffer=lambda: GroupBuffer(
            group_rules(push_kinds.RUN_ID),
            capacity_groups=999,
            capacity_bytes=2**26,
            max_staleness=1,
        ),
    )
    assert not report.passed and report.wrong
