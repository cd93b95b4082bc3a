"""Which prompts are set aside, with workers that are functions of what they hold."""

import random
from collections.abc import Callable

import pytest

from driver.accounting.intake import Intake, IntakeRules
from driver.accounting.leases import LeaseState, LeaseTable, NoPromptLeft, TrajectoryState
from driver.accounting.quarantine import DamagedQuarantine, Quarantine
from driver.fleet.dispatch import Dispatch
from driver.fleet.fleet_worker import HeldLease, Worker
from rollout_worker.worker_records import LeaseOutcome, LeaseResult
from services.control.messages import WorkerState
from services.trajectories.data_order import DataOrder
from services.trajectories.group_report import GroupReport
from services.wire.messages import Lease

CAPACITY, WANTED = 3, 4
Kills = Callable[[Worker], bool]
"""Whether a worker dies over what it holds."""


def positions(worker: Worker) -> set[int]:
    return {lease.position for lease in worker.held_leases}


class Run:
    """Leases, suspects and two workers, which either finish what they hold or die over it."""

    def __init__(self, folder, kills: Kills, *, prompts=40, saved=None, staleness=0):
        self.quarantine = Quarantine(folder)
        self.kills = kills
        aside = self.quarantine.set_aside
        if saved is None:
            self.table = LeaseTable(DataOrder.of_one(1, prompts), set_aside=aside)
        else:
            self.table = LeaseTable.restore(saved, DataOrder.of_one(1, prompts), set_aside=aside)
        self.intake = Intake(self.table, IntakeRules(wanted=WANTED, max_staleness=staleness))
        self.dispatch = Dispatch(CAPACITY, self.quarantine.is_suspect)
        self.workers = [
            Worker(name=f"rollout-{i}", room=None, state=WorkerState.READY, policy_version=0)  # pyright: ignore[reportArgumentType]
            for i in range(2)
        ]
        self.deaths = 0
        self.version = 0
        self.held: list[set[int]] = []
        """What each worker that died was holding."""

    def step(self) -> list[str]:
        for _ in range(200):
            if self.intake.is_ready(self.version, 100):
                break
            room = self.dispatch.room(self.workers)
            leases = self.intake.grant_leases(room, self.version, 100)
            for worker, lease in self.dispatch.assign(self.workers, leases):
                held = HeldLease(lease=lease, given_at=0.0, order_number=1)
                worker.leases[lease.group_id] = held
                assert len(worker.leases) <= CAPACITY
            for worker in self.workers:
                worker.policy_version = self.version
                self.work(worker)
        else:
            raise AssertionError("no step came about")
        batch = self.intake.take_batch(self.version)
        for group_id in batch.kept:
            self.table.end_group(group_id, TrajectoryState.TRAINED)
        self.table.check_conservation()
        self.version += 1
        return batch.kept

    def work(self, worker: Worker) -> None:
        if worker.leases and self.kills(worker):
            self.deaths += 1
            self.held.append(positions(worker))
            self.quarantine.record_death(worker.begun_leases(), "its process ended")
            self.table.return_leases([*worker.leases], LeaseState.EXPIRED)
            worker.leases.clear()
        for group_id in [*worker.leases]:
            lease = worker.leases.pop(group_id).lease
            self.quarantine.clear_group(group_id)
            self.intake.record_result(accepted(lease, self.version))


def accepted(lease: Lease, version: int) -> LeaseResult:
    report = GroupReport(
        group_id=lease.group_id,
        attempt=lease.attempt,
        policy_version=version,
        worker="w",
        zero_variance=False,
        scored=2,
        reward_sum=1.0,
        reward_error="",
        completion_tokens=10,
    )
    return LeaseResult(
        group_id=lease.group_id,
        attempt=lease.attempt,
        order_number=1,
        outcome=LeaseOutcome.ACCEPTED,
        report=report,
    )


def position_of(index: int, prompts=40) -> int:
    return LeaseTable(DataOrder.of_one(1, prompts)).grant_leases(index + 1)[index].position


def test_a_prompt_that_kills_its_worker_alone_is_set_aside_and_the_run_goes_on_R9(
    tmp_path,
):
    poison = position_of(2)
    run = Run(tmp_path, lambda worker: poison in positions(worker))
    assert run.step() == ["g00000000", "g00000001", "g00000003", "g00000004"]
    assert run.deaths == 2 and run.held[1] == {poison}
    assert [*run.quarantine.set_aside] == [poison]
    assert run.step() == [f"g{index:08d}" for index in (5, 6, 7, 8)]
    assert run.table.totals["set_aside"] == 1 and run.table.take_ended_groups()["set_aside"] == [
        "g00000002"
    ]


def test_two_such_prompts_in_one_worker_are_set_aside_and_none_beside_them(tmp_path):
    poison = {position_of(0), position_of(2)}
    run = Run(tmp_path, lambda worker: bool(poison & positions(worker)))
    run.step()
    assert set(run.quarantine.set_aside) == poison and run.deaths <= 4


def test_a_prompt_is_not_leased_in_later_epochs_either(tmp_path):
    poison = position_of(1, prompts=6)
    run = Run(tmp_path, lambda worker: poison in positions(worker), prompts=6)
    kept = [group_id for _ in range(5) for group_id in run.step()]
    assert run.deaths == 2 and len(kept) == 5 * WANTED
    assert run.table.totals["set_aside"] == 4  # of 24 groups, each epoch of six leaves out one


@pytest.mark.parametrize("seed", range(5))
def test_deaths_by_chance_set_nothing_aside(tmp_path, seed):
    """A kill from outside hits what is there; only once in a row here, so that nothing is lost."""
    chance, spared = random.Random(seed), [0]

    def kills(worker: Worker) -> bool:
        spared[0] -= 1
        if spared[0] > 0 or chance.random() > 0.3:
            return False
        spared[0] = 12
        return True

    run = Run(tmp_path, kills)
    undisturbed = Run(tmp_path / "none", lambda worker: False)
    assert [run.step() for _ in range(25)] == [undisturbed.step() for _ in range(25)]
    assert run.deaths > 2 and not run.quarantine.set_aside


def test_a_resume_keeps_suspects_and_what_is_set_aside_R9(tmp_path):
    poison = position_of(2)
    kills: Kills = lambda worker: poison in positions(worker)
    first = Run(tmp_path, kills)
    saved = first.table.state()
    leases = first.intake.grant_leases(3, 0, 9)
    (lease,) = [x for x in leases if x.position == poison]
    for beside in (leases, [lease, leases[0]]):
        assert not first.quarantine.is_suspect(lease), "a single crash slows nothing down"
        assert first.quarantine.record_death(beside, "its process ended") is None
    again = Run(tmp_path, kills, saved=saved)
    assert again.quarantine.is_suspect(lease)
    assert again.step() == ["g00000000", "g00000001", "g00000003", "g00000004"]
    assert again.deaths == 1, "the one before the resume counts"
    once_more = Run(tmp_path, kills, saved=saved)
    assert once_more.step() == ["g00000000", "g00000001", "g00000003", "g00000004"]
    assert once_more.deaths == 0


def test_groups_that_a_worker_cannot_have_begun_are_no_suspects(tmp_path):
    lease = LeaseTable(DataOrder.of_one(0, 4)).grant_leases(1, 3)[0]
    held = HeldLease(lease=lease, given_at=0.0, order_number=1)
    worker = Worker(name="w", room=None, leases={lease.group_id: held})  # pyright: ignore[reportArgumentType]
    assert worker.begun_leases() == []
    worker.policy_version = 2
    assert worker.begun_leases() == []
    worker.policy_version = 3
    assert worker.begun_leases() == [lease]
    worker.evaluates = True
    assert worker.begun_leases() == []


def test_a_run_without_a_prompt_left_ends_with_a_message(tmp_path):
    run = Run(tmp_path, lambda worker: True, prompts=3)
    with pytest.raises(NoPromptLeft, match="each of the 3 prompts of data.train"):
        run.step()


@pytest.mark.parametrize("text", ["", "[]", '{"suspects": [{"position": "1"}], "set_aside": []}'])
def test_a_damaged_record_is_refused_with_the_file(tmp_path, text):
    (tmp_path / "quarantine.json").write_text(text)
    with pytest.raises(DamagedQuarantine, match=r"quarantine\.json is not as this program"):
        Quarantine(tmp_path)
