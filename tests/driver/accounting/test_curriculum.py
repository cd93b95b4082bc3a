"""Which prompts are skipped, for how long, and that a resume repeats every decision."""

import dataclasses
import json

import pytest

from driver.accounting.curriculum import FILE, Curriculum, SkipJournal
from driver.accounting.intake import Intake, IntakeRules
from driver.accounting.leases import LeaseTable, TrajectoryState
from driver.accounting.run_state import RunState
from learner.learner_records import Restored
from rollout_worker.config.data_config import CurriculumConfig
from services.trajectories.data_order import DataOrder, OrderedSource, index_of
from services.trajectories.group_report import GroupReport

PROMPTS = 6
EASY, HARD = 0, 3
"""Positions of prompts that are always right, and always wrong."""
RULES = CurriculumConfig(skip_after=2, epochs=2, most=0.5)
STEP = IntakeRules(wanted=3, max_staleness=0)
TRAINED = TrajectoryState.TRAINED


def report(group_id: str, order: DataOrder, *, equal: bool | None = None) -> GroupReport:
    index = index_of(group_id)
    assert index is not None
    position = order.prompt_at(index)[1]
    return GroupReport(
        group_id=group_id,
        attempt=0,
        policy_version=0,
        worker="rollout-0",
        zero_variance=position in (EASY, HARD) if equal is None else equal,
        scored=2,
        reward_sum=2.0 * (position == EASY),
        reward_error="",
        completion_tokens=1,
    )


class Run:
    """The leases of a synchronous run, step by step; it may be killed and go on."""

    def __init__(self, folder, *, rules=RULES, order=None, kept=None, waiting=()):
        self.folder, self.rules = folder, rules
        self.order = order or DataOrder.of_one(7, PROMPTS)
        restored = kept and Restored(
            step=0,
            policy_version=0,
            driver_state=json.loads(json.dumps(kept)),
            skipped=[],
            set_aside=[],
            replay=[],
            waiting=[report(group_id, self.order) for group_id in waiting],
            issued={},
            repaired="",
        )
        curriculum = Curriculum(rules, self.order, SkipJournal(folder))
        self.state = RunState.create(STEP, self.order, restored=restored, curriculum=curriculum)
        self.leased: list[str] = []

    @property
    def curriculum(self) -> Curriculum:
        assert self.state.curriculum is not None
        return self.state.curriculum

    def lease(self) -> list[str]:
        granted = [one.group_id for one in self.state.intake.grant_leases(99, 0, 99)]
        self.leased += granted
        return granted

    def step(self) -> None:
        """Leases, completes and trains the groups of a step."""
        self.lease()
        held = list(self.state.leases._out) + list(self.state.leases._held)
        groups = sorted(f"g{index:08d}" for index in held)
        self.curriculum.record([report(group_id, self.order) for group_id in groups])
        for group_id in groups:
            self.state.leases.end_group(group_id, TRAINED)
            self.state.intake.discard_groups([group_id])
        self.state.leases.check_conservation()

    def checkpoint(self) -> dict:
        return self.state.checkpoint_state({})

    def positions(self) -> list[tuple[int, int]]:
        """(epoch, position) of every leased group."""
        return [self.order.prompt_at(index_of(group_id) or 0) for group_id in self.leased]


def test_a_prompt_of_equal_rewards_is_skipped_for_its_epochs_and_then_tried_once(tmp_path):
    run = Run(tmp_path)
    while max(epoch for epoch, _ in run.positions() or [(0, 0)]) < 9:
        run.step()
    for position in range(PROMPTS):
        epochs = [epoch for epoch, found in run.positions() if found == position and epoch < 9]
        never_skipped = position not in (EASY, HARD)
        # Twice in a row in epochs 0 and 1, then skipped in 2 and 3, tried in 4, and so on.
        assert epochs == (list(range(9)) if never_skipped else [0, 1, 4, 7])
    skipped = run.state.leases.totals["skipped"]
    assert skipped >= 2 * 5 and run.curriculum.skipping == 2


def test_a_prompt_whose_rewards_differ_again_is_not_skipped_any_more(tmp_path):
    order = DataOrder.of_one(7, PROMPTS)
    curriculum = Curriculum(RULES, order, SkipJournal(tmp_path))

    def record(epoch: int, equal: bool) -> None:
        index = next(i for i in range(99) if order.prompt_at(i) == (epoch, EASY))
        curriculum.record([report(f"g{index:08d}", order, equal=equal)])

    def skips(epoch: int) -> bool:
        return curriculum.skips(next(i for i in range(99) if order.prompt_at(i) == (epoch, EASY)))

    record(0, True)
    assert not skips(1)
    record(1, False)
    record(2, True)
    assert not skips(3)
    record(3, True)
    assert skips(4) and skips(5) and not skips(6)
    record(6, False)
    assert curriculum.skipping == 0 and not skips(7)


def test_no_more_than_the_given_share_of_a_source_is_skipped(tmp_path):
    order = DataOrder(
        0,
        (
            OrderedSource(name="one", count=10, weight=1.0),
            OrderedSource(name="other", count=4, weight=1.0),
        ),
    )
    curriculum = Curriculum(
        CurriculumConfig(skip_after=1, epochs=5, most=0.5), order, SkipJournal(tmp_path)
    )
    curriculum.record([report(f"g{index:08d}", order, equal=True) for index in range(8)])
    assert curriculum.skipping == 6  # four of each were recorded: all of one, half of the other
    curriculum.record([report(f"g{index:08d}", order, equal=True) for index in range(8, 30)])
    assert curriculum.skipping == 5 + 2


@pytest.mark.parametrize("change", [{"reward_error": "raised"}, {"scored": 0}])
def test_groups_that_could_not_be_scored_do_not_count_as_equal(tmp_path, change):
    order = DataOrder.of_one(7, PROMPTS)
    curriculum = Curriculum(CurriculumConfig(skip_after=1, epochs=1), order, SkipJournal(tmp_path))
    failed = [
        dataclasses.replace(report(f"g{index:08d}", order, equal=True), **change)
        for index in range(PROMPTS)
    ]
    curriculum.record(failed)
    assert curriculum.skipping == 0


@pytest.mark.parametrize("killed_after", range(1, 12))
def test_a_run_that_is_killed_and_resumed_leases_the_very_same_groups(tmp_path, killed_after):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, first = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    for _ in range(14):
        whole.step()
    kept = first.checkpoint()
    for step in range(killed_after):
        if step % 3 == 2:
            kept, before = first.checkpoint(), len(first.leased)
        elif step < 2:
            before = 0
        first.step()
    first.lease()  # granted and written down, and never completed
    again = Run(tmp_path / "killed", kept=kept)
    again.leased = first.leased[:before]
    while len(again.leased) < len(whole.leased):
        again.step()
    assert again.leased[: len(whole.leased)] == whole.leased
    assert (tmp_path / "killed" / FILE).is_file()


def test_what_was_decided_stays_although_the_record_has_changed_since(tmp_path):
    run = Run(tmp_path)
    while not run.state.leases.totals["skipped"]:
        run.step()
    (tmp_path / "none").mkdir()
    kept = Run(tmp_path / "none").checkpoint()
    again = Run(tmp_path, kept=kept)  # from before the first step, with an empty record
    while len(again.leased) < len(run.leased):
        again.lease()
        for group_id in again.leased:
            again.state.leases.end_group(group_id, TRAINED)
    assert again.leased[: len(run.leased)] == run.leased


def test_groups_that_wait_at_the_learner_bring_no_skipped_one_back(tmp_path):
    run = Run(tmp_path)
    kept = run.checkpoint()
    while not run.state.leases.totals["skipped"]:
        run.step()
    [*_, last] = run.leased
    again = Run(tmp_path, kept=kept, waiting=[last])
    waits = again.state.leases._returned
    assert {f"g{index:08d}" for index in waits} | {last} == set(run.leased)
    again.state.leases.check_conservation()


def test_a_line_that_a_crash_cut_is_no_decision_and_the_next_one_stays_readable(tmp_path):
    journal = SkipJournal(tmp_path)
    journal.append(4, [1, 3])
    with (tmp_path / FILE).open("a") as file:
        file.write('{"decided": 9, "ski')
    again = SkipJournal(tmp_path)
    assert (again.decided, again.skipped) == (4, {1, 3})
    again.append(6, [5])
    assert (SkipJournal(tmp_path).decided, SkipJournal(tmp_path).skipped) == (6, {1, 3, 5})


def test_without_a_curriculum_nothing_is_written(tmp_path):
    order = DataOrder.of_one(7, PROMPTS)
    Intake(LeaseTable(order), STEP).grant_leases(3, 0, 99)
    assert not (tmp_path / FILE).exists()
