"""Several sources under the lease table: the very same order over kills and resumes."""

import json
import math
import random

import pytest

from driver.accounting.intake import IntakeRules, StepBatch
from driver.accounting.leases import LeaseState, LeaseTable, TrajectoryState
from driver.accounting.ledger import StepLedger
from driver.accounting.run_state import RunState
from learner.learner_records import Restored
from services.trajectories.data_order import DataOrder, OrderedSource
from services.trajectories.group_report import GroupReport

ORDER = DataOrder(
    7,
    (
        OrderedSource(name="sums", count=10, weight=5),
        OrderedSource(name="words", count=6, weight=3),
        OrderedSource(name="code", count=4, weight=2),
    ),
)
TWO_EPOCHS = 40
"""Groups: 20 of ten sums, 12 of six words, 8 of four programs."""
REFERENCE = [
    *[(0, 0), (0, 10), (0, 8), (0, 18), (0, 5), (0, 14), (0, 2), (0, 19), (0, 3), (0, 13)],
    *[(0, 4), (0, 15), (0, 9), (0, 17), (0, 7), (0, 12), (0, 6), (0, 16), (0, 1), (0, 11)],
    *[(1, 9), (1, 12), (1, 8), (1, 18), (1, 2), (1, 13), (1, 0), (1, 19), (1, 3), (1, 15)],
    *[(1, 5), (1, 10), (1, 6), (1, 16), (1, 4), (1, 14), (1, 7), (1, 17), (1, 1), (1, 11)],
]
"""(epoch, position) of the groups of two epochs in an undisturbed run, on every machine."""


def report(lease) -> GroupReport:
    return GroupReport(
        group_id=lease.group_id,
        attempt=lease.attempt,
        policy_version=0,
        worker="rollout-0",
        zero_variance=False,
        scored=2,
        reward_sum=float(lease.position),
        reward_error="",
        completion_tokens=4,
    )


class Run:
    """Leases, returns, trains and saves as a run does; every step trains the oldest groups."""

    def __init__(self, saved=None):
        self.trained: list[tuple[str, int, int]] = []
        table = LeaseTable(ORDER) if saved is None else LeaseTable.restore(saved, ORDER)
        self.table, self.out = table, {}

    def step(self, draw: random.Random, groups=4):
        """Workers take more than a step needs, and some of them give theirs back."""
        while len(self.out) < groups + draw.randrange(3):
            self.out |= {lease.group_id: lease for lease in self.table.grant_leases(1)}
            if draw.random() < 0.3:
                gone = draw.choice(sorted(self.out))
                del self.out[gone]
                self.table.return_leases([gone], LeaseState.RETURNED)
        for group_id in sorted(self.out)[:groups]:
            lease = self.out.pop(group_id)
            assert self.table.end_group(group_id, TrajectoryState.TRAINED)
            self.trained.append((lease.group_id, lease.epoch, lease.position))

    def saved(self):
        return json.loads(json.dumps(self.table.state()))


def test_two_epochs_of_three_sources_are_those_written_down():
    leases = LeaseTable(ORDER).grant_leases(TWO_EPOCHS)
    assert [(lease.epoch, lease.position) for lease in leases] == REFERENCE
    assert sorted(REFERENCE) == [(e, p) for e in (0, 1) for p in range(20)]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_killed_and_resumed_twice_trains_the_very_same_groups(seed):
    draw = random.Random(seed)
    run, steps = Run(), TWO_EPOCHS // 4
    kills = sorted(draw.sample(range(1, steps), 2))
    trained, saved, saved_trained = [], run.saved(), []
    for step in range(1, steps + 1):
        run.step(draw)
        if draw.random() < 0.5:
            saved, saved_trained = run.saved(), trained + run.trained
        while step in kills:
            kills.remove(step)
            # What was trained after the checkpoint is lost with the process, and trained again.
            run, trained = Run(saved), saved_trained
    while len(trained) + len(run.trained) < TWO_EPOCHS:
        run.step(draw)
    order = sorted(trained + run.trained)
    found = {group_id: (epoch, position) for group_id, epoch, position in order}
    for index, place in enumerate(REFERENCE[: TWO_EPOCHS - 8]):
        assert found[f"g{index:08d}"] == place
    assert len(found) == len(order), "no group is trained twice"
    run.table.check_conservation()


def test_the_run_state_of_a_checkpoint_goes_on_in_the_mixed_order():
    rules = IntakeRules(wanted=4, max_staleness=0)
    state, drawn = RunState.create(rules, ORDER), []
    for step in range(TWO_EPOCHS // 4):
        leases = state.intake.grant_leases(4, 0, 100)
        drawn += [(lease.epoch, lease.position) for lease in leases]
        for lease in leases:
            state.leases.end_group(lease.group_id, TrajectoryState.TRAINED)
        if step in (2, 6):  # killed with the next groups under way
            kept = json.loads(json.dumps(state.checkpoint_state({})))
            state.intake.grant_leases(4, 0, 100)
            restored = Restored(
                step=step,
                policy_version=0,
                driver_state=kept,
                skipped=[],
                set_aside=[],
                replay=[],
                waiting=[],
                issued={},
                repaired="",
            )
            state = RunState.create(rules, ORDER, restored=restored)
    assert drawn == REFERENCE


@pytest.mark.parametrize(
    "sources",
    [
        [("sums", 10, 5), ("words", 6, 3)],
        [("sums", 10, 5), ("words", 6, 2), ("code", 4, 3)],
        [("sums", 10, 5), ("words", 4, 3), ("code", 6, 2)],
        [("sums", 20, 1)],
    ],
)
def test_a_checkpoint_of_another_mixture_is_refused(sources):
    other = DataOrder(7, tuple(OrderedSource(name=n, count=c, weight=w) for n, c, w in sources))
    with pytest.raises(ValueError, match="was made with (prompt_count|mixture)=.*same data"):
        LeaseTable.restore(LeaseTable(ORDER).state(), other)


def test_another_scale_of_weights_and_other_names_go_on():
    scaled = DataOrder(
        7,
        tuple(
            OrderedSource(name=f"{one.name}-2", count=one.count, weight=one.weight / 10)
            for one in ORDER.sources
        ),
    )
    assert (
        LeaseTable.restore(LeaseTable(ORDER).state(), scaled).state() == LeaseTable(ORDER).state()
    )


def test_a_single_source_keeps_what_older_runs_keep():
    state = LeaseTable(DataOrder.of_one(3, 9)).state()
    assert [*state] == ["seed", "prompt_count", "cursor", "unfinished", "totals"]


def test_prompts_set_aside_of_one_source_leave_the_others_their_turns():
    aside = dict.fromkeys(range(10, 16))  # all of words
    table = LeaseTable(ORDER, set_aside=aside)
    leases = table.grant_leases(28)
    assert [x.position for x in leases] == [p for _, p in REFERENCE if p not in aside][:28]
    assert table.totals["set_aside"] == table.cursor - 28
    table.check_conservation()


def test_metrics_and_ledger_say_which_source_the_groups_are_of(tmp_path):
    table = LeaseTable(ORDER)
    leases = table.grant_leases(5)
    names = table.names_of(lease.group_id for lease in leases)
    assert [*names.values()] == ["sums", "words", "sums", "code", "sums"]
    reports = [report(lease) for lease in leases]
    metrics = StepBatch(kept=[*names], reports=reports, sources=names).metrics()
    rewards = {
        n: [lease.position / 2 for lease in leases if names[lease.group_id] == n]
        for n in ("sums", "words", "code")
    }
    for name, values in rewards.items():
        assert metrics[f"reward/by_source/{name}"] == pytest.approx(sum(values) / len(values))
        assert metrics[f"rollout/by_source/{name}"] == len(values)
    for lease in leases:
        table.end_group(lease.group_id, TrajectoryState.TRAINED)
    ledger = StepLedger(tmp_path, unexplained_fraction=0.5, warn=lambda _: None)
    record = ledger.close_step(1, {}, wall_s=1.0, leases=table)
    ledger.close_log()
    assert record.sources == {"trained": {"sums": 3, "words": 1, "code": 1}}


def test_a_source_without_a_scored_completion_has_no_mean():
    (lease,) = LeaseTable(ORDER).grant_leases(1)
    failed = GroupReport(**{**report(lease).__dict__, "scored": 0, "reward_sum": 0.0})
    metrics = StepBatch(kept=[], reports=[failed], sources={lease.group_id: "sums"}).metrics()
    assert metrics["rollout/by_source/sums"] == 1.0
    assert "reward/by_source/sums" not in metrics
    assert math.isnan(metrics["reward/total/mean"])


def test_a_single_source_has_no_metrics_of_its_own():
    table = LeaseTable(DataOrder.of_one(0, 4))
    leases = table.grant_leases(2)
    assert table.names_of(lease.group_id for lease in leases) == {}
    metrics = StepBatch(kept=[], reports=[report(lease) for lease in leases]).metrics()
    assert not any("by_source" in name for name in metrics)
