"""Predicted step times: by hand where numbers are few, and against a queue model with noise."""

import math
import statistics

import pytest

from diagnosis.judgement.settling import Settling
from diagnosis.judgement.step_model import StepModel, sides_of
from diagnosis.judgement.what_if import Prediction, WhatIf
from tests.diagnosis.judgement.queue_run import Plant
from tests.diagnosis.judgement.step_facts import settings, step

GROWING = {1: 1, 31: 2, 61: 3}


def simulated(with_settings, workers_at=None, steps=90, **plant) -> WhatIf:
    what_if = WhatIf(with_settings)
    made = Plant(max_staleness=with_settings.max_staleness, **plant)
    for facts in made.steps(workers_at or GROWING, steps):
        what_if.add_step(facts)
    return what_if


def seen(with_settings, **counts):
    """Sides of settled steps by number of workers: `_2=2.0` makes three with work of 2 s."""
    found = {}
    for name, work_s in counts.items():
        workers = int(name[1:])
        facts = step(
            1,
            wall_s=work_s + 1.5,
            learner={"forward_backward": 1.0},
            workers=[{"decode": work_s, "weights_swap": 0.2}] * workers,
            metrics={"time/train/update_s": 1.0, "time/train/rollout_generate_s": work_s + 0.3},
        )
        found[workers] = [sides_of(facts, with_settings)] * 3
    return found


def options(what_if: WhatIf) -> dict:
    return {one["id"]: one for one in what_if.options()}


def test_sides_of_a_synchronous_step():
    sides = seen(settings(), _2=2.0)[2][0]
    assert sides.rollout_s == pytest.approx(2.3) and sides.work_s == 2.0
    assert sides.fixed_s == pytest.approx(0.3)


def test_evaluations_and_checkpoints_are_no_part_of_a_step():
    facts = step(
        1,
        wall_s=5.0,
        learner={"forward_backward": 1.0, "checkpoint": 0.5},
        metrics={"time/eval_s": 1.5},
    )
    assert sides_of(facts, settings()).step_s == pytest.approx(3.0)


def test_of_an_asynchronous_step_the_busy_seconds_are_the_sides():
    facts = step(
        1,
        wall_s=2.2,
        learner={"forward_backward": 1.0, "queue_wait": 1.2},
        workers=[{"decode": 1.5, "weights_swap": 0.2, "weights_wait": 0.4}],
        metrics={"weights/pull_s_max": 0.1},
    )
    sides = sides_of(facts, settings(max_staleness=1))
    assert (sides.update_s, sides.rollout_s) == (1.0, pytest.approx(1.8))


def test_compiling_saving_and_evaluating_are_no_work_of_an_asynchronous_step():
    facts = step(
        1,
        wall_s=4.0,
        learner={"forward_backward": 1.0, "checkpoint": 0.5, "compile": 0.02},
        workers=[{"decode": 1.5, "reward": 0.25, "eval": 0.7, "compile": 0.03}],
    )
    sides = sides_of(facts, settings(max_staleness=1))
    assert (sides.update_s, sides.rollout_s) == pytest.approx((1.0, 1.75))
    assert sides.work_s == 1.75  # waiting for scores is shared by more workers too


def test_a_process_that_was_not_there_for_some_time_unsettles_a_step():
    settling = Settling()
    gone = {3: {"learner": 0.5}, 5: {"rollout-1": 0.01}}
    found = [settling.is_settled(step(n, absent_s=gone.get(n, {}))) for n in range(1, 6)]
    assert found == [False, True, False, True, True]


def test_a_worker_that_comes_back_has_to_work_before_a_step_settles():
    settling = Settling()
    busy, idle = {"decode": 0.5}, {"idle": 2.0}
    rows = [
        [busy, busy],
        [busy, busy],
        [busy],
        [busy, idle],
        [busy, idle],
        [busy, busy],
        [busy] * 2,
    ]
    found = [settling.is_settled(step(n, workers=row)) for n, row in enumerate(rows)]
    assert found == [False, True, False, False, False, False, True]


def test_a_worker_that_has_not_worked_or_compiles_unsettles_a_step():
    settling = Settling()
    idle, busy = {"idle": 2.0}, {"decode": 0.5}
    given = [
        ([busy], False),  # it has just come
        ([busy], True),
        ([busy, idle], False),  # another one starts
        ([busy, {"decode": 0.2, "compile": 1.0}], False),
        ([busy, busy], True),
        ([busy, idle], True),  # it has worked before; there was nothing for it to do
        ([busy], False),  # one has left
        ([busy], True),
    ]
    for number, (workers, expected) in enumerate(given):
        assert settling.is_settled(step(number, workers=workers)) is expected, number
    assert not settling.is_settled(step(9, workers=[busy]), starting=True)
    assert not settling.is_settled(step(10, workers=[busy], metrics={"workers/restarts": 1.0}))


def test_accelerators_share_the_work_until_their_slots_are_not_full():
    """16 groups x 8 in 16 slots: (rows x mean / slots + longest / 2) decode steps."""
    known = seen(settings(), _1=3.6)
    found = StepModel(known, settings()).with_workers(1, 2)
    # From 128 rows to 64: 160 + 20 decode steps to 80 + 20.
    assert found.step_s == pytest.approx(0.3 + 3.6 * 100 / 180 + 1.0 + 0.2)
    assert not found.measured
    wide = settings(slots=256)
    found = StepModel(known, wide).with_workers(1, 2)
    assert found.step_s == pytest.approx(0.3 + 3.6 + 1.0 + 0.2)  # the longest takes as long


def test_workers_on_the_cores_of_one_host_share_little():
    known = seen(settings(platform="cpu"), _1=3.0)
    found = StepModel(known, settings(platform="cpu")).with_workers(1, 2)
    assert found.step_s == pytest.approx(1.5 + 3.0 * 0.5**0.3)
    apart = StepModel(known, settings(platform="cpu"), hosts=2).with_workers(1, 2)
    assert apart.step_s < found.step_s


def test_what_the_run_has_shown_counts_before_any_prior():
    cpu = settings(platform="cpu")
    model = StepModel(seen(cpu, _1=3.0, _2=2.9), cpu)
    found = model.with_workers(2, 1)
    assert found.measured and found.step_s == pytest.approx(4.5)
    # 1 -> 2 gained 3 %: an exponent of 0.049, a third of the way to the prior of 0.3.
    exponent = (2 * 0.0489 + 0.3) / 3
    found = model.with_workers(2, 3)
    assert not found.measured
    assert found.step_s == pytest.approx(1.5 + 2.9 * (6 / 8) ** exponent, rel=1e-3)


def test_impossible_gains_of_the_past_are_noise():
    """1 -> 2 workers that took a tenth of the time count as an exponent of 1.2."""
    cpu = settings(platform="cpu")
    model = StepModel(seen(cpu, _1=5.0, _2=0.5), cpu)
    exponent = (2 * 1.2 + 0.3) / 3
    assert model.with_workers(2, 3).step_s == pytest.approx(1.5 + 0.5 * (6 / 8) ** exponent)
    worse = StepModel(seen(cpu, _1=0.5, _2=5.0), cpu)
    exponent = (2 * -0.5 + 0.3) / 3
    assert worse.with_workers(2, 3).step_s == pytest.approx(1.5 + 5.0 * (6 / 8) ** exponent)


def test_work_that_was_seen_is_that_of_a_token():
    run = settings()
    one = sides_of(of_length(1, 1, tokens=500, mean=20, work_s=1.0, update_s=0.9), run)
    two = sides_of(of_length(2, 2, tokens=1000, mean=20, work_s=1.2, update_s=0.9), run)
    model = StepModel({1: [one] * 3, 2: [two] * 3}, run)
    assert model.with_workers(2, 1).step_s == pytest.approx(2.0 + 0.2 + 0.9)


def test_a_deeper_queue_evens_out_which_side_is_longer():
    """Sides of 1 and 3 s, in turns: each step takes 3 s, and with slack 2 s in the median."""
    run = settings(max_staleness=1)
    turns = [
        step(n, wall_s=3.1, learner={"forward_backward": u}, workers=[{"decode": 4.0 - u}])
        for n, u in enumerate((1.0, 3.0, 2.0, 1.0, 3.0))
    ]
    model = StepModel({1: [sides_of(facts, run) for facts in turns]}, run)
    assert model.with_staleness(1, 2).step_s == pytest.approx(2.0 + 0.1)
    deep = settings(max_staleness=2)
    model = StepModel({1: [sides_of(facts, deep) for facts in turns]}, deep)
    assert model.with_staleness(1, 1).step_s == pytest.approx(3.0 + 1.1)


def test_staleness_hides_the_shorter_side():
    model = StepModel(seen(settings(), _2=2.0), settings())
    # R 2.3, U 1.0, rest 0.2; 95 % of the shorter side is hidden.
    assert model.with_staleness(2, 1).step_s == pytest.approx(2.3 + 0.05 * 1.0 + 0.2)
    assert model.with_staleness(2, 2).step_s == pytest.approx(2.3 + 0.05 * 1.0 + 0.2)
    together = settings(colocated=True)
    assert StepModel(seen(together, _1=2.0), together).with_staleness(1, 1).step_s == (
        pytest.approx(3.5)
    )


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_of_noisy_steps_a_worker_more_and_a_worker_fewer_are_not_both_faster(max_staleness):
    """The median step is 3.5 s, but the median sides take 1.2 s each: medians do not add up."""
    cpu = settings(platform="cpu", max_staleness=max_staleness)
    noisy = []
    for decode_s, update_s in ((3.0, 1.0), (1.0, 3.0), (1.2, 1.2), (1.0, 3.1), (3.2, 1.0)):
        facts = step(
            1,
            wall_s=decode_s + update_s,
            learner={"forward_backward": update_s},
            workers=[{"decode": decode_s}] * 2,
            metrics={"time/train/update_s": update_s, "time/train/rollout_generate_s": decode_s},
        )
        noisy.append(sides_of(facts, cpu))
    model = StepModel({2: noisy}, cpu)
    now_s = model.with_workers(2, 2).step_s
    assert model.with_workers(2, 3).step_s <= now_s <= model.with_workers(2, 1).step_s
    assert model.with_half_length(2).step_s <= now_s
    if max_staleness:
        assert model.with_staleness(2, 0).step_s >= now_s >= model.with_staleness(2, 2).step_s


def test_without_staleness_the_sides_follow_each_other_again():
    asynchronous = settings(max_staleness=1)
    facts = step(
        1,
        wall_s=2.4,
        learner={"forward_backward": 1.0},
        workers=[{"decode": 2.0, "weights_swap": 0.2}],
    )
    model = StepModel({1: [sides_of(facts, asynchronous)] * 3}, asynchronous)
    assert model.with_staleness(1, 0).step_s == pytest.approx(2.2 + 0.95 * 1.0 + 0.2)


def test_half_the_length_takes_away_what_lies_beyond():
    measured = {"rollout/tokens_beyond_half": 0.25, "rollout/completion_len_mean": 20.0}
    cpu = settings(platform="cpu")
    facts = step(
        1,
        wall_s=3.5,
        learner={"forward_backward": 1.0},
        workers=[{"decode": 2.0}],
        metrics=measured | {"time/train/update_s": 1.0, "time/train/rollout_generate_s": 2.3},
    )
    found = StepModel({1: [sides_of(facts, cpu)] * 3}, cpu).with_half_length(1)
    # Update: (40 + 15) of (40 + 20) tokens are read.
    assert found.step_s == pytest.approx(0.3 + 2.0 * 0.75 + 55 / 60 + 0.2)
    assert "25 % of the tokens lie beyond 20" in found.note


def test_half_the_length_of_a_log_without_it_takes_at_most_the_mean():
    cpu = settings(platform="cpu", max_completion_tokens=30)
    facts = of_length(1, 1, tokens=1000, mean=20, work_s=2.0, update_s=1.2)
    found = StepModel({1: [sides_of(facts, cpu)] * 3}, cpu).with_half_length(1)
    # 15 of 20 tokens are left, and the update reads 40 + 15 of 40 + 20.
    assert found.step_s == pytest.approx(2.0 * 0.75 + 0.2 + 1.1) and "upper bound" in found.note


def test_an_error_is_above_0_where_the_step_was_faster_than_predicted():
    assert Prediction(step=1, predicted=1.2, actual=1.0).error == pytest.approx(0.2)


def test_half_the_length_changes_nothing_where_no_completion_is_longer():
    short = settings(max_completion_tokens=80)
    found = StepModel(seen(short, _2=2.0), short).with_half_length(2)
    assert found.step_s == pytest.approx(3.5) and found.measured


def test_options_keep_to_the_bounds_of_the_run():
    what_if = simulated(settings(workers_max=3))
    assert set(options(what_if)) == {"fewer", "staleness_1", "staleness_2", "half_length"}
    assert options(what_if)["fewer"]["sure"] == "measured"
    alone = simulated(settings(colocated=True), {1: 1}, steps=10)
    assert set(options(alone)) == {"staleness_1", "staleness_2", "half_length"}


@pytest.mark.parametrize(
    "with_settings, plant",
    [
        (settings(), {}),
        (settings(), {"token_s": 0.004, "update_s": 0.5}),
        (settings(max_staleness=1), {}),
        (settings(max_staleness=1), {"token_s": 0.004, "update_s": 0.3}),
        (settings(platform="cpu"), {"contention": 0.75}),
        (settings(platform="cpu", max_staleness=1), {"contention": 0.75, "token_s": 0.001}),
    ],
    ids=["sync", "sync-rollouts", "async", "async-rollouts", "cpu", "cpu-async"],
)
def test_predictions_hold_while_workers_go_from_one_to_three(with_settings, plant):
    """The goal of the What-if view: a median error below 15 %, of steps and of changes."""
    errors, changes = [], []
    for seed in range(5):
        what_if = simulated(with_settings, seed=seed, **plant)
        assert [(c.before, c.after) for c in what_if.changes] == [(1, 2), (2, 3)]
        errors += what_if.errors
        changes += [abs(change.error) for change in what_if.changes]
    assert statistics.median(errors) < 0.15
    assert statistics.median(changes) < 0.15


def of_length(number, workers, *, tokens, mean, work_s, update_s, fixed_s=0.2):
    return step(
        number,
        wall_s=work_s + fixed_s + update_s,
        learner={"forward_backward": update_s},
        workers=[{"decode": work_s}] * workers,
        metrics={
            "time/train/update_s": update_s,
            "time/train/rollout_generate_s": work_s + fixed_s,
            "rollout/tokens": tokens,
            "rollout/completion_len_mean": mean,
        },
    )


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_step_of_other_lengths_is_put_to_the_tokens_asked_for(max_staleness):
    """Twice the completion tokens: twice the work, and (40 + 40) for (40 + 20) tokens read."""
    run = settings(max_staleness=max_staleness)
    longer = sides_of(of_length(1, 1, tokens=2000, mean=40, work_s=2.0, update_s=1.2), run)
    found = longer.at_length(1000.0, 20.0, run)
    assert found.work_s == pytest.approx(1.0) and found.update_s == pytest.approx(0.9)
    assert found.fixed_s == pytest.approx(longer.fixed_s)
    assert found.step_s == pytest.approx([1.0 + 0.2 + 0.9, 3.4 - 2.0 + 1.0][max_staleness])
    assert longer.at_length(math.nan, math.nan, run).step_s == longer.step_s


def test_a_change_is_judged_at_the_tokens_of_its_prediction():
    """With the second worker completions become twice as long: no doing of the worker."""
    what_if = WhatIf(settings())
    for n in range(1, 15):
        what_if.add_step(of_length(n, 1, tokens=1000, mean=20, work_s=1.0, update_s=0.9))
    for n in range(15, 30):
        what_if.add_step(of_length(n, 2, tokens=2000, mean=40, work_s=1.1, update_s=2.4))
    (change,) = what_if.changes
    assert change.actual == pytest.approx(0.55 + 0.2 + 1.8)
    # The update took twice as long for each token: that much is the machine's.
    assert (change.update_before_s, change.update_after_s) == pytest.approx((0.9, 1.8))


def test_a_number_of_workers_that_was_seen_brings_its_own_hand_overs():
    run = settings()
    one = sides_of(of_length(1, 1, tokens=1000, mean=20, work_s=1.0, update_s=0.9), run)
    two = of_length(2, 2, tokens=1000, mean=20, work_s=0.6, update_s=0.9, fixed_s=0.5)
    model = StepModel({1: [one] * 3, 2: [sides_of(two, run)] * 3}, run)
    assert model.with_workers(1, 2).step_s == pytest.approx(0.6 + 0.5 + 0.9)
    assert model.with_workers(2, 1).step_s == pytest.approx(1.0 + 0.2 + 0.9)


def test_a_change_is_judged_by_as_many_steps_as_it_rests_on():
    """Of the ten steps after it, and not of the first of them, which may be odd ones."""
    what_if = WhatIf(settings())
    for n in range(1, 15):
        what_if.add_step(of_length(n, 1, tokens=1000, mean=20, work_s=1.0, update_s=0.9))
    for n in range(15, 26):
        slow = 0.5 if n < 20 else 0.0
        what_if.add_step(of_length(n, 2, tokens=1000, mean=20, work_s=0.6 + slow, update_s=0.9))
        assert len(what_if.changes) == (n == 25)  # 15 is the new worker's first
    assert what_if.changes[0].actual == pytest.approx(1.7)


def test_a_change_is_predicted_before_and_judged_after():
    what_if = simulated(settings(), {1: 1, 31: 2}, steps=42, noise=0.0)
    (change,) = what_if.changes
    # Step 31 compiles, and the worker is new in it: 32 is the first that counts.
    assert (change.step, change.before, change.after) == (32, 1, 2)
    others = [p for p in what_if.past if p.step == 31]
    assert not others


def test_a_run_without_a_change_has_predictions_and_no_change():
    answer = simulated(settings(), {1: 2}, steps=20).json()
    assert answer is not None
    assert answer["changes"] == []
    assert answer["error"]["count"] == len(answer["past"]) == 18
    assert answer["now"]["workers"] == 2 and answer["now"]["max_staleness"] == 0
    assert answer["past"][0]["step"] == 3  # 1 compiles, 2 is the first settled one


def test_nothing_is_said_before_the_first_settled_step():
    what_if = WhatIf(settings())
    assert what_if.json() is None and what_if.options() == []
    what_if.add_step(step(1))
    assert what_if.json() is None


def test_a_step_whose_times_are_not_finite_is_left_out():
    what_if = WhatIf(settings())
    for number in range(1, 9):
        bad = {"time/train/update_s": float("nan" if number == 5 else "1")}
        what_if.add_step(step(number, metrics=bad))
    answer = what_if.json()
    assert answer is not None and answer["now"]["step_s"] == 2.0
    assert 5 not in [one["step"] for one in answer["past"]]
