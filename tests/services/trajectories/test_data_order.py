"""The data order: without replacement, a pure function of seed and epoch."""

import numpy as np
import pytest

from services.trajectories.data_order import epoch_order, prompt_at


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
