"""What a step was waiting for."""

import pytest

from diagnosis.judgement.breakdown import (
    OTHER,
    PHASE_GROUPS,
    bottleneck,
    by_group,
    critical_path,
    is_overlapped,
    path_segments,
)
from services.process.phases import PHASES
from tests.diagnosis.judgement.step_facts import step

SYNCHRONOUS = step(
    1,
    wall_s=4.0,
    learner={"forward_backward": 1.5, "optimizer": 0.5, "queue_wait": 1.8, "unexplained": 0.2},
    workers=[{"decode": 0.5}, {"weights_wait": 0.25, "decode": 1.0, "reward": 0.25}],
)
OVERLAPPED = step(
    2,
    wall_s=4.0,
    learner={"forward_backward": 2.0, "queue_wait": 2.0},
    workers=[{"decode": 3.5, "weights_wait": 0.5}],
)


def test_a_synchronous_path_is_the_busiest_worker_and_then_the_learner():
    assert critical_path(SYNCHRONOUS) == pytest.approx(
        {
            "decode": 1.0,
            "reward": 0.25,
            "weights_wait": 0.25,
            "forward_backward": 1.5,
            "optimizer": 0.5,
            OTHER: 0.5,
        }
    )
    assert {part.process for part in path_segments(SYNCHRONOUS)} == {"learner", "rollout-1"}


def test_where_the_sides_overlap_the_path_is_the_longer_one_and_what_it_waited_for():
    assert is_overlapped(OVERLAPPED)
    assert critical_path(OVERLAPPED) == {"decode": 3.5, "forward_backward": 0.5, OTHER: 0.0}
    slow_learner = step(3, wall_s=4.0, learner={"forward_backward": 3.9}, workers=[{"decode": 2.0}])
    assert critical_path(slow_learner) == pytest.approx(
        {"forward_backward": 3.9, "decode": 0.1, OTHER: 0.0}
    )
    too_long = step(4, wall_s=4.0, learner={"optimizer": 4.5}, workers=[{"decode": 2.0}])
    assert critical_path(too_long) == {"optimizer": 4.5, OTHER: 0.0}


def test_a_first_step_whose_sides_overlap_a_little_is_explained():
    """As measured: the workers start on the next groups when the learner begins to compile."""
    first = step(
        1,
        wall_s=16.34,
        learner={"compile": 6.59, "forward_backward": 1.18, "idle": 8.57},
        workers=[{"compile": 8.59, "decode": 0.74, "idle": 7.01}],
    )
    path = critical_path(first)
    assert path[OTHER] == 0.0
    assert path["compile"] == pytest.approx(8.59 + 7.01 * 6.59 / 7.77)
    assert path["forward_backward"] == pytest.approx(7.01 * 1.18 / 7.77)


def test_a_path_adds_up_to_the_wall_time():
    for facts in (SYNCHRONOUS, OVERLAPPED, step(3), step(4, workers=[])):
        assert sum(critical_path(facts).values()) == pytest.approx(facts.wall_s)


def test_a_wait_for_weights_that_does_not_fit_is_a_wait_for_the_learner():
    facts = step(1, workers=[{"decode": 0.8, "weights_wait": 1.2}])
    assert "weights_wait" not in critical_path(facts)


def test_phases_of_a_group_are_added_up_and_every_phase_has_a_group():
    assert by_group({"optimizer": 1.0, "forward_backward": 2.0, OTHER: 0.5}) == {
        "update": 3.0,
        OTHER: 0.5,
    }
    assert sorted(phase for group in PHASE_GROUPS.values() for phase in group) == sorted(PHASES)


def test_the_bottleneck_is_a_sentence_with_numbers():
    found = bottleneck([SYNCHRONOUS])
    assert found is not None
    assert found.text == "forward, backward of the learner takes 38 % of a step (1.50 of 4.00 s)"
    assert (found.process, found.phase) == ("learner", "forward_backward")
    assert found.share == pytest.approx(0.375)


def test_an_overlapped_bottleneck_says_how_long_the_other_side_waits():
    found = bottleneck([OVERLAPPED, OVERLAPPED])
    assert found is not None
    assert found.text == (
        "decode of rollout-0 takes 88 % of a step (3.50 of 4.00 s); meanwhile the learner "
        "waits 50 % of the time"
    )


def test_one_noisy_step_does_not_move_the_bottleneck():
    usual = [step(n, learner={"forward_backward": 1.0}) for n in range(9)]
    noisy = step(9, learner={"checkpoint": 1.0, "forward_backward": 0.1})
    found = bottleneck([*usual, noisy])
    assert found is not None and found.phase == "forward_backward"


def test_time_that_no_process_accounts_for_can_be_the_bottleneck():
    found = bottleneck(
        [step(1, wall_s=9.0, learner={"forward_backward": 1.0}, workers=[{"decode": 1.0}])]
    )
    assert found is not None
    assert found.phase == OTHER and found.process == ""
    assert found.text.startswith("no process accounts for 78 % of a step (7.00 of 9.00 s)")
    assert bottleneck([]) is None
