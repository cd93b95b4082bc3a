"""Every prompt is leased in its turn, and every lease and every group ends once."""

import json
import random

import pytest

from driver.accounting.data_order import prompt_at
from driver.accounting.leases import LeaseBook, LeaseState, LedgerError, TrajectoryState

TRAINED = TrajectoryState.TRAINED
RETURNED, EXPIRED = LeaseState.RETURNED, LeaseState.EXPIRED


def book_of(count=10, seed=0):
    return LeaseBook(seed=seed, prompt_count=count)


def through_json(state):
    return json.loads(json.dumps(state))


def train(book, leases):
    for lease in leases:
        assert book.end(lease.group_id, TRAINED) is TRAINED


def give_all_back(book):
    return book.give_back([f"g{index:08d}" for index in range(book.cursor)], RETURNED)


def order_index(lease):
    return int(lease.group_id[1:])


def test_c03_resume_trains_what_was_in_flight_and_nothing_twice(cases):
    case = cases("checkpoint")["C03"]["input"]
    count, per_step = case["prompts"], case["prompts_per_step"]
    book = book_of(count)
    positions = []
    for _ in range(case["checkpoint_at_step"]):
        leases = book.lease(per_step)
        positions += [lease.position for lease in leases]
        train(book, leases)
    ahead = book.lease(len(case["prompts_already_handed_to_workers_when_saved"]))
    assert [order_index(lease) for lease in ahead] == [6, 7, 8, 9]
    saved = through_json(book.state())

    resumed = LeaseBook.restore(saved, seed=0, prompt_count=count)
    expected = cases("checkpoint")["C03"]["expected"]
    first = resumed.lease(per_step)
    assert [order_index(lease) for lease in first] == expected["next_trained_prompts"]
    assert [lease.attempt for lease in first] == [1, 1]
    assert first[0].position == ahead[0].position
    train(resumed, first)
    second = resumed.lease(per_step)
    train(resumed, second)
    positions += [lease.position for lease in first + second]
    assert sorted(positions) == expected["trained_exactly_once_in_the_epoch"]
    (next_epoch,) = resumed.lease(1)
    assert (next_epoch.epoch, order_index(next_epoch)) == (1, 10)


def test_leases_follow_the_data_order_across_epochs():
    book = book_of(count=3, seed=7)
    leases = book.lease(8)
    assert [(x.epoch, x.position) for x in leases] == [prompt_at(7, 3, i) for i in range(8)]
    assert [x.epoch for x in leases] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert len({x.group_id for x in leases}) == 8


def test_what_comes_back_is_leased_first_and_counts_its_attempt():
    book = book_of()
    leases = book.lease(4)
    train(book, leases[1:2])
    assert give_all_back(book) == 3 and book.outstanding == 0
    again = book.lease(4)
    assert [(order_index(x), x.attempt) for x in again] == [(0, 1), (2, 1), (3, 1), (4, 0)]
    book.check()


def test_each_group_ends_once_and_later_deliveries_are_duplicates():
    book = book_of()
    first, second = book.lease(2)
    assert book.end(first.group_id, TrajectoryState.DROPPED_STALE) is TrajectoryState.DROPPED_STALE
    assert book.end(first.group_id, TRAINED) is TrajectoryState.DUPLICATE
    assert book.end(second.group_id, TrajectoryState.DUPLICATE) is TrajectoryState.DUPLICATE
    assert book.outstanding == 1  # a repeated push does not end what is still to be trained
    book.end(second.group_id, TRAINED)
    book.check()
    assert book.totals == {
        "trained": 1,
        "dropped_stale": 1,
        "dropped_zero_variance": 0,
        "dropped_error": 0,
        "duplicate": 2,
    }


def test_a_group_that_was_given_back_may_still_arrive():
    book = book_of()
    (lease,) = book.lease(1)
    give_all_back(book)
    assert book.end(lease.group_id, TRAINED) is TRAINED
    assert [order_index(x) for x in book.lease(1)] == [1]
    book.check()


@pytest.mark.parametrize("group_id", ["g00000005", "g5", "x", "", "g-0000001"])
def test_a_group_that_was_never_leased_cannot_end(group_id):
    book = book_of()
    book.lease(5)
    with pytest.raises(LedgerError, match="was never leased: the next new group is g00000005"):
        book.end(group_id, TRAINED)


def test_a_lost_lease_breaks_the_conservation_law_with_all_numbers():
    book = book_of()
    train(book, book.lease(2))
    book.lease(3)
    book._out.popitem()
    with pytest.raises(
        LedgerError, match="5 groups were leased, but 2 ended, 2 are out, 0 lie with the learner"
    ):
        book.check()


def test_a_lease_that_nobody_accounts_for_breaks_the_law_of_leases():
    book = book_of()
    train(book, book.lease(2))
    book._granted += 1
    with pytest.raises(LedgerError, match="3 leases were granted, but 2 are accounted for"):
        book.check()


def test_every_lease_ends_done_returned_or_expired():
    book = book_of()
    ids = [lease.group_id for lease in book.lease(6)]
    assert book.hold(ids[0]) and not book.hold(ids[0]), "held once"
    assert book.give_back(ids[:3], EXPIRED) == 2, "what the learner holds is not taken back"
    assert book.give_back([ids[3]], RETURNED) == 1
    assert book.lease_totals == {"done": 1, "returned": 1, "expired": 2, "out": 2}
    assert book.outstanding == 3
    book.check()


def test_groups_of_a_learner_that_outlived_the_books_are_held_and_what_lies_between_comes_again():
    book = book_of()
    train(book, book.lease(2))
    book = LeaseBook.restore(through_json(book.state()), seed=0, prompt_count=10)
    book.adopt(["g00000005", "g00000003"])
    assert book.cursor == 6 and book.outstanding == 2
    again = book.lease(3)
    assert [(order_index(x), x.attempt) for x in again] == [(2, 1), (4, 1), (6, 0)]
    assert not book.hold("g00000003"), "it is known already"
    assert book.end("g00000003", TRAINED) is TRAINED
    book.check()


@pytest.mark.parametrize("seed", range(5))
def test_any_history_with_crashes_trains_every_index_once(seed):
    random_ = random.Random(seed)
    book, saved = book_of(count=7, seed=seed), None
    trained, trained_when_saved = [], []
    for _ in range(200):
        event = random_.random()
        if event < 0.1:
            give_all_back(book)
        elif event < 0.2:
            saved, trained_when_saved = through_json(book.state()), list(trained)
        elif event < 0.3 and saved:
            book = LeaseBook.restore(saved, seed=seed, prompt_count=7)
            trained = list(trained_when_saved)
        else:
            leases = book.lease(random_.randint(1, 4))
            done = leases[: random_.randint(0, len(leases))]
            train(book, done)
            trained += [order_index(lease) for lease in done]
        book.check()
    give_all_back(book)
    while True:
        (lease,) = book.lease(1)
        train(book, [lease])
        trained.append(order_index(lease))
        if not book.state()["unfinished"]:
            break
    assert sorted(trained) == list(range(book.cursor))


@pytest.mark.parametrize("changed", [{"seed": 1}, {"prompt_count": 11}])
def test_a_checkpoint_of_another_order_is_refused(changed):
    state = book_of().state()
    with pytest.raises(ValueError, match="the checkpoint was made with (seed=0|prompt_count=10)"):
        LeaseBook.restore(state, **({"seed": 0, "prompt_count": 10} | changed))
