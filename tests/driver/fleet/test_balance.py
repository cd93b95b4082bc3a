"""The decision of `policy: balance`, tried on a model of a run.

In the model a step's groups take `rollout_s / workers` seconds and its update takes `update_s`. The
two overlap in an asynchronous run and take turns in a synchronous one.
"""

import itertools
import random

import pytest

from driver.fleet.balance import BalanceRule, BalanceState, StepWaits, balance, waits_of, wish

RULE = BalanceRule()


def step_waits(rollout_s, update_s, overlap):
    wall_s = max(rollout_s, update_s) if overlap else rollout_s + update_s
    return StepWaits(learner=1 - update_s / wall_s, workers=1 - rollout_s / wall_s)


def simulate(
    *, rollout_s, update_s, start, least=1, most=64, steps=300, overlap=True, noise=0.0, seed=0
):
    """Target after every step; a change reaches the fleet two steps after it was decided."""
    draw = random.Random(seed)
    state, target, workers, targets = BalanceState(), start, [start] * 3, []
    for _ in range(steps):
        fleet = workers[-2]
        waits = step_waits(
            rollout_s / fleet * draw.gauss(1, noise), update_s * draw.gauss(1, noise), overlap
        )
        state, change = balance(
            state, waits, workers=fleet, target=target, least=least, most=most, rule=RULE
        )
        target += change
        workers.append(target)
        targets.append(target)
    return targets


def turns(targets):
    """How often the direction of the changes turned."""
    changes = [b - a for a, b in itertools.pairwise(targets) if a != b]
    return sum(a != b for a, b in itertools.pairwise(changes))


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5, 2.9, 3.6, 5.0, 7.3, 12.0])
@pytest.mark.parametrize("start", [1, 20])
def test_overlapping_sides_settle_where_neither_waits_much(ratio, start):
    targets = simulate(rollout_s=ratio, update_s=1.0, start=start)
    settled = targets[-1]
    assert set(targets[-150:]) == {settled} and turns(targets) == 0
    assert step_waits(ratio / settled, 1.0, True).learner <= RULE.add_above
    if settled > 1:
        assert ratio / (settled - 1) > RULE.busy_below, "one fewer would have been enough"


def test_the_size_that_is_reached_by_hand():
    # 3.6 s of rollout per 1 s of update: 3 workers leave the learner waiting for a sixth of the
    # step, 4 keep up with 0.9 s, and 5 would be busy for 0.72 s.
    assert simulate(rollout_s=3.6, update_s=1.0, start=1)[-1] == 4
    assert simulate(rollout_s=3.5, update_s=1.0, start=9)[-1] == 4
    assert simulate(rollout_s=3.6, update_s=1.0, start=1, most=2)[-1] == 2
    assert simulate(rollout_s=0.1, update_s=1.0, start=9, least=3)[-1] == 3


@pytest.mark.parametrize("start", [1, 30])
def test_sides_that_take_turns_settle_too(start):
    targets = simulate(rollout_s=2.0, update_s=1.0, start=start, overlap=False, steps=600)
    assert len(set(targets[-100:])) == 1 and turns(targets) == 0
    # 2 / n of 2 / n + 1 seconds is at most 0.15 from 12 workers on
    assert start > 12 or targets[-1] == 12


@pytest.mark.parametrize("ratio", [1.0, 2.2, 3.0, 3.5, 4.0, 6.4])
@pytest.mark.parametrize("start", [1, 10])
def test_noise_of_a_tenth_does_not_make_it_flap(ratio, start):
    for seed in range(10):
        targets = simulate(rollout_s=ratio, update_s=1.0, start=start, noise=0.1, seed=seed)
        assert turns(targets) == 0
        assert abs(targets[-1] - max(1, round(ratio))) <= 1


def test_a_change_of_the_load_is_followed_both_ways():
    first = simulate(rollout_s=2.0, update_s=1.0, start=1)[-1]
    longer = simulate(rollout_s=6.0, update_s=1.0, start=first)[-1]
    shorter = simulate(rollout_s=2.0, update_s=1.0, start=longer)[-1]
    assert first == 2 and longer == 6 and 2 <= shorter <= 3


def test_a_single_step_that_disagrees_starts_the_count_anew():
    waiting, calm = StepWaits(learner=0.5, workers=0.0), StepWaits(learner=0.0, workers=0.0)
    state = BalanceState()
    for waits in [*[waiting] * (RULE.steps - 1), calm, *[waiting] * (RULE.steps - 1)]:
        state, change = balance(state, waits, workers=2, target=2, least=1, most=4, rule=RULE)
        assert change == 0
    state, change = balance(state, waiting, workers=2, target=2, least=1, most=4, rule=RULE)
    assert change == 1


def test_steps_of_a_fleet_that_is_not_at_its_target_are_passed_over():
    waiting, state = StepWaits(learner=0.9, workers=0.0), BalanceState()
    for _ in range(50):
        state, change = balance(state, waiting, workers=2, target=3, least=1, most=9, rule=RULE)
        assert change == 0
    assert state == BalanceState(cool_down=RULE.cool_down_steps)


def test_the_last_worker_is_never_wished_away():
    assert wish(StepWaits(learner=0.0, workers=1.0), 1, RULE) == 0
    assert wish(StepWaits(learner=0.0, workers=1.0), 2, RULE) == -1


def test_waiting_is_read_from_the_ledger_of_a_step():
    phases = {
        "learner": {"forward_backward": 6.0, "queue_wait": 3.0, "idle": 1.0},
        "rollout-0": {"decode": 8.0, "weights_wait": 2.0},
        "rollout-1": {"decode": 4.0, "weights_wait": 2.0, "idle": 4.0},
    }
    waits = waits_of(phases, 10.0)
    assert (waits.learner, waits.workers) == pytest.approx((0.4, 0.4))


@pytest.mark.parametrize("change", [{"drain_below": 0.08}, {"busy_below": 1.0}, {"steps": 0}])
def test_thresholds_between_which_a_run_would_swing_are_refused(change):
    with pytest.raises(ValueError, match="got BalanceRule"):
        BalanceRule(**change)
