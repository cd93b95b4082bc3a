"""Which groups train and how many are under way, with workers that are functions."""

import math
import random

import pytest

from driver.accounting.intake import Intake, IntakeRules, StepBatch
from driver.accounting.leases import LeaseTable
from rollout_worker.worker_records import LeaseOutcome, LeaseResult
from services.trajectories.data_order import DataOrder
from services.trajectories.group_report import GroupReport

ACCEPTED, DUPLICATE, STALE = LeaseOutcome.ACCEPTED, LeaseOutcome.DUPLICATE, LeaseOutcome.STALE
MANY = 10**6


def report_of(group_id, version, *, equal=False, scored=2, reward=0.5):
    return GroupReport(
        group_id=group_id,
        attempt=0,
        policy_version=version,
        worker="w",
        zero_variance=equal,
        scored=scored,
        reward_sum=reward * scored,
        reward_error="" if scored == 2 else "mine:score raised KeyError: 'x'",
        completion_tokens=10,
    )


def ended(lease, version, outcome=ACCEPTED, **fields):
    return LeaseResult(
        group_id=lease.group_id,
        attempt=lease.attempt,
        order_number=1,
        outcome=outcome,
        report=report_of(lease.group_id, version, **fields),
        samples=({"group_id": lease.group_id},),
    )


def intake_of(*, wanted=3, staleness=0, rounds=0, samples=0):
    table = LeaseTable(DataOrder.of_one(0, 100))
    rules = IntakeRules(
        wanted=wanted, max_staleness=staleness, resample_rounds=rounds, samples=samples
    )
    return table, Intake(table, rules)


def ids(*indices):
    return [f"g{index:08d}" for index in indices]


def train(table, batch):
    from driver.accounting.leases import TrajectoryState

    for group_id in batch.kept:
        table.end_group(group_id, TrajectoryState.TRAINED)


def test_groups_are_in_data_order_whichever_worker_was_faster():
    _, intake = intake_of()
    for lease in reversed(intake.grant_leases(MANY, 0, 5)):
        assert not intake.is_ready(0, 5)
        intake.record_result(ended(lease, 0))
    assert intake.is_ready(0, 5)
    batch = intake.take_batch(0)
    assert batch.kept == ids(0, 1, 2) and batch.dropped == []
    assert batch.metrics()["rollout/tokens"] == 30 and len(batch.samples) == 3


def test_synchronous_mode_leases_one_step_at_a_time_under_its_own_version():
    table, intake = intake_of()
    leases = intake.grant_leases(2, 7, 5)
    assert len(leases) == 2, "no more than there is room for"
    leases += intake.grant_leases(MANY, 7, 5)
    assert [lease.min_policy_version for lease in leases] == [7, 7, 7]
    for lease in leases:
        intake.record_result(ended(lease, 7))
    batch = intake.take_batch(7)
    assert intake.grant_leases(MANY, 7, 5) == [], "not before the update has ended"
    train(table, batch)
    assert [lease.min_policy_version for lease in intake.grant_leases(MANY, 8, 4)] == [8, 8, 8]


def test_with_staleness_later_steps_are_made_ahead_under_versions_that_will_still_do():
    _, intake = intake_of(staleness=2)
    leases = intake.grant_leases(MANY, 5, MANY)
    assert len(leases) == 9, "three steps: the one that is due and two ahead"
    assert [lease.min_policy_version for lease in leases] == [3, 3, 3, 4, 4, 4, 5, 5, 5]
    for lease in leases[:3]:
        intake.record_result(ended(lease, 5))
    intake.take_batch(5)
    assert intake.grant_leases(MANY, 5, MANY) == [], "groups in training count until they end"


def test_a_step_reports_its_own_groups_and_counts_all_tokens_since_the_last_step():
    _, intake = intake_of(staleness=1)
    for index, lease in enumerate(intake.grant_leases(MANY, 0, MANY)):
        intake.record_result(ended(lease, 0, reward=float(index // 3)))
    first, second = intake.take_batch(0), intake.take_batch(1)
    assert [batch.metrics()["reward/total/mean"] for batch in (first, second)] == [0.0, 1.0]
    assert [batch.metrics()["rollout/tokens"] for batch in (first, second)] == [60, 0]


def test_nothing_is_leased_beyond_the_last_step():
    _, intake = intake_of(staleness=2)
    assert len(intake.grant_leases(MANY, 5, 1)) == 3


def test_case_r07_old_groups_are_dropped_and_counted_and_the_oldest_that_may_train_come_first(
    cases,
):
    case = cases("lifecycle")["R07"]
    learner, limit = case["input"]["learner_version"], case["input"]["max_lag"]
    groups = {}
    for one in case["input"]["trajectories"]:
        oldest = groups.get(one["group"], one["version"])
        groups[one["group"]] = min(oldest, one["version"])
    table, intake = intake_of(wanted=2, staleness=limit)
    names = {}
    for (name, version), lease in zip(
        groups.items(), intake.grant_leases(3, learner, 5), strict=True
    ):
        names[lease.group_id] = name
        intake.record_result(ended(lease, version))
    batch = intake.take_batch(learner)
    assert sorted(names[g] for g in batch.kept) == case["expected"]["used_groups"]
    assert [names[g] for g in batch.dropped] == case["expected"]["dropped_stale_groups"]
    assert table.totals["dropped_stale"] == 1


def test_what_grew_too_old_makes_room_for_new_prompts():
    table, intake = intake_of(staleness=1)
    for lease in intake.grant_leases(MANY, 0, MANY):
        intake.record_result(ended(lease, 0))
    train(table, intake.take_batch(0))
    train(table, intake.take_batch(1))
    late = intake.grant_leases(MANY, 2, MANY)
    for lease in late[:2]:
        intake.record_result(ended(lease, 2))
    intake.record_result(ended(late[2], 1))
    assert [lease.min_policy_version for lease in intake.grant_leases(MANY, 4, MANY)][-1] >= 4
    assert table.totals["dropped_stale"] == 3


def test_equal_rewards_are_replaced_only_where_asked():
    equal = {1: dict(equal=True, reward=1.0), 3: dict(equal=True, reward=0.0)}
    for rounds, kept, dropped in ((0, ids(0, 1, 2), []), (4, ids(0, 2, 4), ids(1, 3))):
        table, intake = intake_of(rounds=rounds)
        while not intake.is_ready(0, 5):
            for lease in intake.grant_leases(MANY, 0, 5):
                intake.record_result(ended(lease, 0, **equal.get(int(lease.group_id[1:]), {})))
        batch = intake.take_batch(0)
        assert batch.kept == kept and batch.dropped == dropped
        assert table.totals["dropped_zero_variance"] == len(dropped)
        if rounds:
            metrics = batch.metrics()
            assert metrics["rollout/zero_variance_fraction"] == pytest.approx(2 / 5)
            assert metrics["reward/total/mean"] == pytest.approx((1.0 + 0.0 + 3 * 0.5) / 5)


def test_replacing_ends_after_its_rounds_and_the_step_trains_on_fewer():
    table, intake = intake_of(wanted=2, rounds=1)
    while not intake.is_ready(0, 5):
        for lease in intake.grant_leases(MANY, 0, 5):
            intake.record_result(ended(lease, 0, equal=lease.group_id != "g00000001"))
    batch = intake.take_batch(0)
    assert batch.kept == ids(1) and batch.dropped == ids(0, 2, 3)
    assert table.cursor == 4, "two steps' worth of prompts at most"


@pytest.mark.parametrize("seed", range(10))
def test_which_groups_are_replaced_does_not_depend_on_who_is_faster(seed):
    """The same groups train, in any order of arrival and with any room for leases."""

    def run(order):
        table, intake = intake_of(wanted=4, rounds=2)
        out = []
        while not intake.is_ready(0, 5):
            out += intake.grant_leases(order.randint(1, 3), 0, 5)
            if out and order.random() < 0.7:
                lease = out.pop(order.randrange(len(out)))
                equal = random.Random(f"{seed} {lease.group_id}").random() < 0.5
                intake.record_result(ended(lease, 0, equal=equal))
        batch = intake.take_batch(0)
        return batch.kept, batch.dropped, table.cursor

    assert len({str(run(random.Random(order))) for order in range(20)}) == 1


def test_a_duplicate_waits_until_the_learner_confirms_its_group():
    table, intake = intake_of(wanted=1)
    (lease,) = intake.grant_leases(1, 0, 5)
    intake.record_result(ended(lease, 0, DUPLICATE))
    assert intake.unconfirmed == {lease.group_id} and not intake.is_ready(0, 5)
    intake.adopt_reports([report_of(lease.group_id, 0)])
    assert intake.is_ready(0, 5) and intake.take_batch(0).kept == [lease.group_id]
    assert table.totals["duplicate"] == 1
    table.check_conservation()


def test_a_group_that_the_learner_refused_for_its_age_gives_its_place_to_the_next():
    table, intake = intake_of(wanted=1)
    (lease,) = intake.grant_leases(1, 0, 5)
    intake.record_result(ended(lease, 0, STALE))
    assert [lease.group_id for lease in intake.grant_leases(1, 0, 5)] == ids(1)
    assert table.totals["dropped_stale"] == 1


def test_recorded_updates_are_repeated_as_they_were():
    table, intake = intake_of(wanted=2, rounds=3)
    table.grant_leases(1)
    reports = [report_of(group_id, 0) for group_id in ids(0, 2, 3)]
    batch = intake.repeat_batch(ids(0, 3), ids(2), reports)
    assert batch.kept == ids(0, 3) and batch.metrics()["rollout/tokens"] == 30
    train(table, batch)
    assert [lease.group_id for lease in intake.grant_leases(MANY, 1, 5)] == ids(1, 4)
    table.check_conservation()


def test_completions_that_could_not_be_scored_are_said():
    _, intake = intake_of(wanted=2)
    first, second = intake.grant_leases(2, 0, 5)
    intake.record_result(ended(first, 0))
    intake.record_result(ended(second, 0, scored=0))
    batch = intake.take_batch(0)
    assert batch.reward_problem().startswith("completions of 1 of 2 groups could not be scored")
    assert batch.metrics()["reward/total/mean"] == 0.5
    assert math.isnan(intake.take_batch(0).metrics()["reward/total/mean"])


SKIPPED = {"train/update_skipped": 1.0}


def skip_cause(metrics, *ends, kept=None, **fields):
    """The cause for groups that ended in these states in an update, or came to none ('')."""
    names = ids(*range(len(ends)))
    kept = names if kept is None else ids(*kept)
    batch = StepBatch(
        kept=kept,
        dropped=[name for name in names if name not in kept],
        reports=[report_of(name, 0, **fields) for name in names],
    )
    outcomes = {name: end for name, end in zip(names, ends, strict=True) if end}
    return batch.skip_cause(metrics, outcomes)


def test_an_update_that_was_not_finite_is_not_one_that_had_nothing_to_train_on():
    assert skip_cause({"train/update_skipped": 0.0, "train/loss": 0.1}, "trained") == ""
    for loss in (math.nan, 0.5):  # the gradient alone may be infinite
        assert skip_cause(SKIPPED | {"train/loss": loss}, "dropped_error") == (
            "its loss or gradient was not finite; its groups are in rejected/"
        )
    assert skip_cause(SKIPPED) == "no group came that could train"


def test_the_cause_of_an_empty_update_says_what_became_of_its_groups():
    assert skip_cause(SKIPPED, "dropped_error", "dropped_error", scored=0) == (
        "no completion could be scored, the first for: mine:score raised KeyError: 'x'"
    )
    equal, error, stale = "dropped_zero_variance", "dropped_error", "dropped_stale"
    assert skip_cause(SKIPPED, equal, error, equal) == (
        "nothing was left to train on, groups: 2 of equal rewards, 1 without a scored completion"
    )
    assert skip_cause(SKIPPED, stale, "trained") == (
        "nothing was left to train on, groups: 1 too old or outside the off-policy bounds, "
        "1 with no completion left"
    )


def test_groups_that_were_dropped_before_the_update_count_in_its_cause():
    assert skip_cause(SKIPPED, "", "", kept=[], equal=True) == (
        "nothing was left to train on, groups: 2 of equal rewards"
    )
    assert skip_cause(SKIPPED, "", kept=[]) == (
        "nothing was left to train on, groups: 1 too old or outside the off-policy bounds"
    )


@pytest.mark.parametrize(
    "wanted, samples, logged",
    [
        (6, 0, ""),
        (6, 1, "0"),
        (6, 2, "0 3"),
        (6, 4, "0 1 2 3 4 5"),
        (7, 3, "0 2 4 6"),
        (2, 9, "0 1"),
    ],
)
def test_the_configured_number_of_leases_or_a_few_more_ask_for_a_sample(wanted, samples, logged):
    table, intake = intake_of(wanted=wanted, samples=samples)
    for version in range(3):
        leases = []
        while new := intake.grant_leases(2, version, 5):
            leases += new
        marked = [index for index, lease in enumerate(leases) if lease.logged]
        assert len(leases) == wanted and len(marked) >= min(samples, wanted)
        if version == 0:
            assert " ".join(map(str, marked)) == logged
        for lease in leases:
            intake.record_result(ended(lease, version))
        train(table, intake.take_batch(version))


def test_samples_of_a_group_that_was_taken_twice_are_those_of_the_first():
    _, intake = intake_of(wanted=1)
    (lease,) = intake.grant_leases(1, 0, 5)
    intake.record_result(ended(lease, 0))
    intake.record_result(ended(lease, 0, DUPLICATE))
    intake.adopt_reports([report_of(lease.group_id, 0)])
    assert len(intake.take_batch(0).samples) == 1
