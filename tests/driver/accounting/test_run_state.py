import json

from driver.accounting.accuracy import Accuracy
from driver.accounting.intake import IntakeRules
from driver.accounting.run_state import RunState
from learner.learner_records import Restored
from services.trajectories.data_order import DataOrder

RULES = IntakeRules(wanted=2, max_staleness=0)


def resumed(driver_state) -> RunState:
    restored = Restored(
        step=3,
        policy_version=3,
        driver_state=json.loads(json.dumps(driver_state)),
        skipped=[],
        set_aside=[],
        replay=[],
        waiting=[],
        issued={},
        repaired="",
    )
    return RunState.create(RULES, DataOrder.of_one(0, 4), restored=restored)


def test_accuracy_and_its_absence_survive_a_checkpoint():
    state = RunState.create(RULES, DataOrder.of_one(0, 4))
    state.evaluations.add("", 0, None, None)
    state.evaluations.add("", 3, Accuracy(correct=2, total=3, correct_from=9.0), None)
    kept = resumed(state.checkpoint_state({})).evaluations
    assert kept.accuracy == state.evaluations.accuracy


def test_a_checkpoint_that_knows_neither_threshold_nor_dropped_truncated_resumes():
    kept = RunState.create(RULES, DataOrder.of_one(0, 4)).checkpoint_state({})
    del kept["book"]["totals"]["dropped_truncated"]
    del kept["evaluations"]
    state = resumed({**kept, "accuracy": [[0, 1, 4]]})
    assert state.evaluations.accuracy == {"": {0: Accuracy(correct=1, total=4)}}
    assert state.leases.totals["dropped_truncated"] == 0
