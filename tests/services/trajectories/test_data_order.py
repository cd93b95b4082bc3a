"""The data order: without replacement, a pure function of seed and epoch."""

import numpy as np
import pytest

from services.trajectories.data_order import DataOrder, OrderedSource, epoch_order, prompt_at


def test_order_is_the_same_on_every_machine_and_version():
    assert epoch_order(0, 0, 10).tolist() == [1, 4, 5, 6, 8, 2, 0, 3, 9, 7]
    assert epoch_order(0, 1, 10).tolist() == [7, 8, 6, 2, 9, 3, 1, 0, 4, 5]
    assert epoch_order(2**31 - 1, 7, 5).tolist() == [3, 2, 0, 4, 1]


@pytest.mark.parametrize("count", [1, 2, 10, 997])
@pytest.mark.parametrize("start", [0, 3, 1234])
def test_a_cursor_from_anywhere_takes_each_prompt_once_per_epoch(count, start):
    seen: dict[int, list[int]] = {}
    for index in range(start, start + 3 * count):
        epoch, position = prompt_at(5, count, index)
        assert epoch == index // count
        seen.setdefault(epoch, []).append(position)
    whole = [positions for positions in seen.values() if len(positions) == count]
    assert len(whole) >= 2
    for positions in whole:
        assert sorted(positions) == list(range(count))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_without_shuffling_each_source_is_drawn_from_as_it_stands():
    sources = tuple(OrderedSource(name=n, count=c, weight=1.0) for n, c in (("a", 3), ("b", 2)))
    order = DataOrder(5, sources, shuffled=False)
    drawn = [order.prompt_at(index) for index in range(10)]
    assert [one for one in drawn if one[1] < 3] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [one for one in drawn if one[1] >= 3] == [(0, 3), (0, 4), (1, 3), (1, 4), (2, 3)]


def test_every_place_is_equally_likely():
    first = [int(epoch_order(seed, 0, 4)[0]) for seed in range(2000)]
    # 2000 draws from four: mean 500, sigma 19.4; five sigma either way.
    assert all(403 < count < 597 for count in np.bincount(first, minlength=4))


@pytest.mark.shared
def test_case_C03_resume_takes_the_prompts_that_were_handed_out_but_not_trained(cases):
    case = cases("checkpoint")["C03"]
    count, per_step = case["input"]["prompts"], case["input"]["prompts_per_step"]
    cursor = case["input"]["checkpoint_at_step"] * per_step  # the only state that is kept
    in_order = [prompt_at(0, count, index)[1] for index in range(count)]
    resumed = [prompt_at(0, count, index)[1] for index in range(cursor, count)]
    expected = case["expected"]["next_trained_prompts"]
    assert resumed[:per_step] == [in_order[place] for place in expected]
    trained = in_order[:cursor] + resumed
    assert sorted(trained) == case["expected"]["trained_exactly_once_in_the_epoch"]


def test_the_cached_order_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(0, 0, 10)[0] = 3


@pytest.mark.parametrize("seed, count, index", [(-1, 10, 0), (0, 0, 0), (0, 10, -1)])
def test_bad_arguments_are_refused(seed, count, index):
    with pytest.raises(ValueError, match=f"seed={seed}, index={index}, count={count}"):
        prompt_at(seed, count, index)


def mixed(*sources, seed=7):
    named = (
        OrderedSource(name=name, count=count, weight=weight)
        for name, (count, weight) in zip("abcdefgh", sources, strict=False)
    )
    return DataOrder(seed, tuple(named))


def test_the_order_of_one_source_is_what_it_was_before_there_were_several():
    order = DataOrder.of_one(5, 9)
    for index in range(40):
        assert order.prompt_at(index) == prompt_at(5, 9, index)
        assert order.epoch_at(index) == index // 9
    assert order.draws_before(40) == (40,) and order.count == 9 and not order.is_mixed


def test_a_mixed_order_is_the_same_on_every_machine_and_version():
    order = mixed((6, 5), (4, 3), (3, 2))
    assert [order.prompt_at(index) for index in range(26)] == [
        *[(0, 0), (0, 6), (0, 5), (0, 12), (0, 2), (0, 9), (0, 3), (0, 11), (0, 4), (0, 8)],
        *[(0, 1), (0, 7), (1, 2), (0, 10), (1, 0), (1, 8), (1, 3), (1, 12), (1, 5), (1, 9)],
        *[(1, 4), (1, 6), (1, 1), (1, 10), (2, 1), (1, 7)],
    ]


def test_each_source_is_passed_through_whole_before_one_of_its_prompts_comes_again():
    order = mixed((6, 5), (4, 3), (3, 2), (1, 0.1))
    seen: dict[tuple[str, int], list[int]] = {}
    for index in range(500):
        epoch, position = order.prompt_at(index)
        name = order.source_of_position(position).name
        assert (order.source_at(index).name, order.epoch_at(index)) == (name, epoch)
        seen.setdefault((name, epoch), []).append(position)
    ranges = {"a": range(6), "b": range(6, 10), "c": range(10, 13), "d": range(13, 14)}
    last = {name: max(epoch for other, epoch in seen if other == name) for name in ranges}
    for (name, epoch), positions in seen.items():
        assert len(set(positions)) == len(positions)
        if epoch < last[name]:
            assert sorted(positions) == list(ranges[name])


def test_two_sources_of_one_size_have_orders_of_their_own():
    order = mixed((50, 1), (50, 1))
    drawn = [order.prompt_at(index)[1] for index in range(100)]
    first = [position for position in drawn if position < 50]
    second = [position - 50 for position in drawn if position >= 50]
    assert sorted(first) == sorted(second) and first != second


def test_names_and_the_scale_of_the_weights_do_not_change_the_order():
    order, other = (
        mixed((6, 5), (4, 3)),
        DataOrder(
            7,
            (
                OrderedSource(name="x", count=6, weight=0.625),
                OrderedSource(name="y", count=4, weight=0.375),
            ),
        ),
    )
    assert order.mixture() == other.mixture() == [[6, "5/8"], [4, "3/8"]]
    assert all(order.prompt_at(index) == other.prompt_at(index) for index in range(60))


@pytest.mark.parametrize("seed, count, weight", [(-1, 4, 1.0), (0, 0, 1.0), (0, 4, 0.0)])
def test_a_bad_order_is_refused(seed, count, weight):
    with pytest.raises(ValueError, match="needs"):
        DataOrder(seed, (OrderedSource(name="x", count=count, weight=weight),))
    with pytest.raises(ValueError, match="at least 0, got -1"):
        DataOrder.of_one(0, 4).prompt_at(-1)
