"""How a step comes by its groups, with workers that are functions."""

import math

import pytest

from driver.batch import collect_groups
from driver.ledger import LeaseBook
from rollout_worker.actor import GroupReport, RolloutReport


def report_of(lease, *, outcome="accepted", equal=False, scored=2, reward=0.5):
    return GroupReport(
        group_id=lease.group_id,
        outcome=outcome,
        zero_variance=equal,
        scored=scored,
        reward_sum=reward * scored,
        reward_error="" if scored == 2 else "mine:score raised KeyError: 'x'",
        completion_tokens=10,
    )


def worker(**by_index):
    """A rollout that makes groups as told by their index: `g3=dict(equal=True)`."""

    def rollout(leases):
        groups = [report_of(x, **by_index.get(f"g{int(x.group_id[1:])}", {})) for x in leases]
        return [
            RolloutReport(worker="w", policy_version=0, groups=[group], samples=[])
            for group in reversed(groups)
        ]

    return rollout


@pytest.fixture
def book():
    return LeaseBook(seed=0, prompt_count=100)


def ids(*indices):
    return [f"g{index:08d}" for index in indices]


def test_groups_stand_in_the_order_of_the_data_whoever_was_faster(book):
    batch = collect_groups(book, worker(), wanted=3, rounds=1, resample=False)
    assert batch.kept == ids(0, 1, 2) and batch.dropped == []
    assert batch.metrics()["rollout/tokens"] == 30


def test_equal_rewards_are_replaced_only_where_asked(book):
    told = worker(g1=dict(equal=True, reward=1.0), g3=dict(equal=True, reward=0.0))
    batch = collect_groups(book, told, wanted=3, rounds=4, resample=True)
    assert batch.kept == ids(0, 2, 4) and batch.dropped == ids(1, 3)
    assert book.totals["dropped_zero_variance"] == 2 and book.outstanding == 3
    metrics = batch.metrics()
    assert metrics["rollout/zero_variance_fraction"] == pytest.approx(2 / 5)
    assert metrics["reward/total/mean"] == pytest.approx((1.0 + 0.0 + 3 * 0.5) / 5)

    kept = collect_groups(
        LeaseBook(seed=0, prompt_count=9), told, wanted=3, rounds=4, resample=False
    )
    assert kept.kept == ids(0, 1, 2)


def test_a_step_that_finds_no_variance_ends_after_its_rounds(book):
    told = worker(**{f"g{i}": dict(equal=True) for i in range(12)})
    batch = collect_groups(book, told, wanted=3, rounds=4, resample=True)
    assert batch.kept == [] and batch.dropped == ids(*range(12))
    book.check()


def test_a_group_that_no_scorer_could_judge_goes_to_the_learner_which_books_it(book):
    told = worker(g0=dict(scored=0))
    batch = collect_groups(book, told, wanted=1, rounds=1, resample=True)
    assert batch.kept == ids(0)
    assert math.isnan(batch.metrics()["reward/total/mean"])
    assert "1 of 1 groups" in batch.reward_problem() and "KeyError" in batch.reward_problem()


def test_a_stale_group_is_booked_and_replaced(book):
    batch = collect_groups(
        book, worker(g0=dict(outcome="stale")), wanted=1, rounds=2, resample=False
    )
    assert batch.kept == ids(1)
    assert book.totals["dropped_stale"] == 1


def test_a_repeated_delivery_counts_once(book):
    told = worker(g0=dict(outcome="duplicate"))
    batch = collect_groups(book, told, wanted=2, rounds=1, resample=False)
    assert batch.kept == ids(0, 1) and book.totals["duplicate"] == 1
