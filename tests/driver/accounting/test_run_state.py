"""Where a run stands, and when it has come to nothing."""

import math

from driver.accounting.intake import IntakeRules
from driver.accounting.run_state import RunState
from learner.learner_records import Restored

RULES = IntakeRules(wanted=2, max_staleness=0)


def new_state(kept=None):
    restored = None
    if kept is not None:
        restored = Restored(
            step=2,
            policy_version=2,
            driver_state=kept,
            skipped=[],
            replay=[],
            waiting=[],
            issued={},
        )
    return RunState.create(RULES, seed=0, prompt_count=8, restored=restored)


def test_a_run_whose_every_update_was_skipped_has_failed_for_the_last_cause():
    state = new_state()
    assert state.failure == "", "no step was taken yet"
    state.record_update(math.nan, "no completion could be scored, the first for: x")
    state.record_update(0.0, "nothing was left to train on, groups: 2 of equal rewards")
    assert state.failure == (
        "nothing was trained: each of 2 updates was skipped, the last one because nothing was "
        "left to train on, groups: 2 of equal rewards"
    )


def test_one_update_is_enough():
    state = new_state()
    state.record_update(math.nan, "no completion could be scored")
    state.record_update(0.5, "")
    state.record_update(math.nan, "no completion could be scored")
    assert state.failure == "" and len(state.rewards) == 3


def test_what_was_skipped_is_kept_over_a_resume():
    state = new_state()
    state.record_update(math.nan, "its loss or gradient was not finite")
    resumed = new_state(state.checkpoint_state({}))
    assert resumed.failure == state.failure != ""
    resumed.record_update(0.5, "")
    assert new_state(resumed.checkpoint_state({})).failure == ""


def test_a_checkpoint_without_the_count_takes_a_step_with_a_reward_for_an_update():
    state = new_state()
    state.record_update(0.5, "")
    kept = state.checkpoint_state({})
    del kept["updates"], kept["skip_cause"]
    assert new_state(kept).failure == ""
