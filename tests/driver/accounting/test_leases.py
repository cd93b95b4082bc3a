"""Every prompt is leased in its turn, and every lease and every group ends once."""

import json
import random

import pytest

from driver.accounting.leases import LeaseState, LeaseTable, LedgerError, TrajectoryState
from services.trajectories.data_order import DataOrder, prompt_at

TRAINED = TrajectoryState.TRAINED
RETURNED, EXPIRED = LeaseState.RETURNED, LeaseState.EXPIRED


def table_of(count=10, seed=0):
    return LeaseTable(DataOrder.of_one(seed, count))


def through_json(state):
    return json.loads(json.dumps(state))


def train(table, leases):
    for lease in leases:
        assert table.end_group(lease.group_id, TRAINED) is TRAINED


def give_all_back(table):
    return table.return_leases([f"g{index:08d}" for index in range(table.cursor)], RETURNED)


def order_index(lease):
    return int(lease.group_id[1:])


def test_c03_resume_trains_what_was_in_flight_and_nothing_twice(cases):
    case = cases("checkpoint")["C03"]["input"]
    count, per_step = case["prompts"], case["prompts_per_step"]
    table = table_of(count)
    positions = []
    for _ in range(case["checkpoint_at_step"]):
        leases = table.grant_leases(per_step)
        positions += [lease.position for lease in leases]
        train(table, leases)
    ahead = table.grant_leases(len(case["prompts_already_handed_to_workers_when_saved"]))
    assert [order_index(lease) for lease in ahead] == [6, 7, 8, 9]
    saved = through_json(table.state())

    resumed = LeaseTable.restore(saved, DataOrder.of_one(0, count))
    expected = cases("checkpoint")["C03"]["expected"]
    first = resumed.grant_leases(per_step)
    assert [order_index(lease) for lease in first] == expected["next_trained_prompts"]
    assert [lease.attempt for lease in first] == [1, 1]
    assert first[0].position == ahead[0].position
    train(resumed, first)
    second = resumed.grant_leases(per_step)
    train(resumed, second)
    positions += [lease.position for lease in first + second]
    assert sorted(positions) == expected["trained_exactly_once_in_the_epoch"]
    (next_epoch,) = resumed.grant_leases(1)
    assert (next_epoch.epoch, order_index(next_epoch)) == (1, 10)


def test_leases_follow_the_data_order_across_epochs():
    table = table_of(count=3, seed=7)
    leases = table.grant_leases(8)
    assert [(x.epoch, x.position) for x in leases] == [prompt_at(7, 3, i) for i in range(8)]
    assert [x.epoch for x in leases] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert len({x.group_id for x in leases}) == 8


def test_what_comes_back_is_leased_first_and_counts_its_attempt():
    table = table_of()
    leases = table.grant_leases(4)
    train(table, leases[1:2])
    assert give_all_back(table) == 3 and table.outstanding == 0
    again = table.grant_leases(4)
    assert [(order_index(x), x.attempt) for x in again] == [(0, 1), (2, 1), (3, 1), (4, 0)]
    table.check_conservation()


def test_each_group_ends_once_and_later_deliveries_are_duplicates():
    table = table_of()
    first, second = table.grant_leases(2)
    assert (
        table.end_group(first.group_id, TrajectoryState.DROPPED_STALE)
        is TrajectoryState.DROPPED_STALE
    )
    assert table.end_group(first.group_id, TRAINED) is TrajectoryState.DUPLICATE
    assert table.end_group(second.group_id, TrajectoryState.DUPLICATE) is TrajectoryState.DUPLICATE
    assert table.outstanding == 1  # a repeated push does not end what is still to be trained
    table.end_group(second.group_id, TRAINED)
    table.check_conservation()
    assert table.totals == {
        "trained": 1,
        "dropped_stale": 1,
        "dropped_zero_variance": 0,
        "dropped_truncated": 0,
        "dropped_error": 0,
        "set_aside": 0,
        "skipped": 0,
        "duplicate": 2,
    }


def test_a_group_that_was_given_back_may_still_arrive():
    table = table_of()
    (lease,) = table.grant_leases(1)
    give_all_back(table)
    assert table.end_group(lease.group_id, TRAINED) is TRAINED
    assert [order_index(x) for x in table.grant_leases(1)] == [1]
    table.check_conservation()


@pytest.mark.parametrize("group_id", ["g00000005", "g5", "x", "", "g-0000001"])
def test_a_group_that_was_never_leased_cannot_end(group_id):
    table = table_of()
    table.grant_leases(5)
    with pytest.raises(LedgerError, match="was never leased: the next new group is g00000005"):
        table.end_group(group_id, TRAINED)


def test_a_lost_lease_breaks_the_conservation_law_with_all_numbers():
    table = table_of()
    train(table, table.grant_leases(2))
    table.grant_leases(3)
    table._out.popitem()
    with pytest.raises(
        LedgerError, match="5 groups were leased, but 2 ended, 2 are out, 0 lie with the learner"
    ):
        table.check_conservation()


def test_an_unaccounted_lease_breaks_the_conservation_of_leases():
    table = table_of()
    train(table, table.grant_leases(2))
    table._granted += 1
    with pytest.raises(LedgerError, match="3 leases were granted, but 2 are accounted for"):
        table.check_conservation()


def test_every_lease_ends_done_returned_or_expired():
    table = table_of()
    ids = [lease.group_id for lease in table.grant_leases(6)]
    assert table.mark_held(ids[0]) and not table.mark_held(ids[0]), "held once"
    assert table.return_leases(ids[:3], EXPIRED) == 2, "what the learner holds is not taken back"
    assert table.return_leases([ids[3]], RETURNED) == 1
    assert table.lease_totals == {"done": 1, "returned": 1, "expired": 2, "out": 2}
    assert table.outstanding == 3
    table.check_conservation()


def test_groups_newer_than_a_restored_table_are_adopted_and_those_between_are_leased_again():
    table = table_of()
    train(table, table.grant_leases(2))
    table = LeaseTable.restore(through_json(table.state()), DataOrder.of_one(0, 10))
    table.adopt_groups(["g00000005", "g00000003"])
    assert table.cursor == 6 and table.outstanding == 2
    again = table.grant_leases(3)
    assert [(order_index(x), x.attempt) for x in again] == [(2, 1), (4, 1), (6, 0)]
    assert not table.mark_held("g00000003"), "it is known already"
    assert table.end_group("g00000003", TRAINED) is TRAINED
    table.check_conservation()


@pytest.mark.parametrize("seed", range(5))
def test_any_history_with_crashes_trains_every_index_once(seed):
    random_ = random.Random(seed)
    table, saved = table_of(count=7, seed=seed), None
    trained, trained_when_saved = [], []
    for _ in range(200):
        event = random_.random()
        if event < 0.1:
            give_all_back(table)
        elif event < 0.2:
            saved, trained_when_saved = through_json(table.state()), list(trained)
        elif event < 0.3 and saved:
            table = LeaseTable.restore(saved, DataOrder.of_one(seed, 7))
            trained = list(trained_when_saved)
        else:
            leases = table.grant_leases(random_.randint(1, 4))
            done = leases[: random_.randint(0, len(leases))]
            train(table, done)
            trained += [order_index(lease) for lease in done]
        table.check_conservation()
    give_all_back(table)
    while True:
        (lease,) = table.grant_leases(1)
        train(table, [lease])
        trained.append(order_index(lease))
        if not table.state()["unfinished"]:
            break
    assert sorted(trained) == list(range(table.cursor))


@pytest.mark.parametrize("order", [DataOrder.of_one(1, 10), DataOrder.of_one(0, 11)])
def test_a_checkpoint_of_another_order_is_refused(order):
    state = table_of().state()
    with pytest.raises(ValueError, match="the checkpoint was made with (seed=0|prompt_count=10)"):
        LeaseTable.restore(state, order)
