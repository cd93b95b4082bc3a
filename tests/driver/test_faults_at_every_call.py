"""An error at every call of the driver that can raise: what is recorded stays whole.

`World.fault` is reached in every such call of an actor's handle, of the launcher and of the rooms,
and the events of the fleet. Whatever a run ends with, it has said so, and its last closed step is
where a resume finds it.
"""

import collections
import random

import pytest

from driver.errors import RunError
from driver.fleet.actor_calls import ActorFailed, ActorLost
from driver.session import Session
from tests.driver.simulated_run import SimulatedRun, World

pytestmark = pytest.mark.slow

STEPS = 8


def places(tmp_path, monkeypatch) -> list[str]:
    """Every call that can raise in a run without errors, in order."""
    reached: list[str] = []
    world = World()
    world.fault = reached.append
    run = simulated(tmp_path / "undisturbed", world).run(monkeypatch)
    assert run.error is None
    return reached


def simulated(folder, world: World, **changes) -> SimulatedRun:
    return SimulatedRun(folder, world, steps=STEPS, eval__every_steps=3, **changes)


def raised_at(place: str, kind: type[RunError]) -> RunError:
    return kind(f"made up, in {place}", details="of Ray")


def ends_well(run: SimulatedRun) -> None:
    """Checks that a run trained all its groups once, or ended with a reason and a way on."""
    saved = run.world.saved
    if run.error is None:
        assert sorted(run.world.trained) == [f"g{i:08d}" for i in range(4 * STEPS)]
        assert saved is not None and saved[0] == STEPS
        return
    assert isinstance(run.error, RunError), run.error
    assert run.status["exit_code"] == run.error.exit_code
    assert run.status["reason"] == str(run.error)
    if run.said_of("writing a checkpoint") and not run.said_of("no checkpoint was written"):
        assert run.ended_in_checkpoint(run.error.exit_code)


def test_an_error_at_any_one_call_leaves_the_records_whole_F07_R05(tmp_path, monkeypatch):
    reached = places(tmp_path, monkeypatch)
    assert len({place.split()[-1] for place in reached}) > 10
    firsts = {place: at for at, place in reversed([*enumerate(reached)])}
    lasts = {place: at for at, place in enumerate(reached)}
    for number, target in enumerate(sorted({*firsts.values(), *lasts.values()})):
        world, count = World(), iter(range(10**9))
        kind = (ActorLost, ActorFailed)[number % 2]

        def fault(place, count=count, target=target, kind=kind):
            if next(count) == target:
                raise raised_at(place, kind)

        world.fault = fault
        changes = {"placement__worker_restarts": 3 * (number // 2 % 2)}
        ends_well(simulated(tmp_path / f"{number}", world, **changes).run(monkeypatch))


@pytest.mark.parametrize("seed", range(8))
def test_whatever_fails_and_however_often_the_records_stay_whole(tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    world = World("learner a b s1 s2 s3")
    rate = draw.choice([0.002, 0.01, 0.05])

    def fault(place: str) -> None:
        if place != "rooms.state" and draw.random() < rate:
            raise raised_at(place, draw.choice([ActorLost, ActorFailed]))

    world.fault = fault
    for name in draw.sample(["learner", "a", "b", "s1"], draw.randrange(4)):
        world.at(draw.uniform(5.0, 150.0), lambda name=name: world.lose_host(name))
    for _ in range(draw.randrange(6)):
        who = draw.choice(["learner", "rollout-0", "rollout-1"])
        world.at(draw.uniform(15.0, 100.0), lambda who=who: world.end_newest(who))
    ends_well(simulated(tmp_path / "run", world).run(monkeypatch))


@pytest.mark.parametrize("event", ["_record_end", "_return_leases", "_admit", "_release", "_warn"])
def test_an_error_of_an_event_leaves_no_worker_between_two_states_F07(tmp_path, monkeypatch, event):
    """The fleet calls others after it has changed what it records: they find it whole."""
    world = World()
    for at_s in (25.0, 40.0, 55.0):
        world.at(at_s, lambda: world.end_newest("rollout-0"))
    calls = collections.Counter()
    real = getattr(Session, event)

    def failing(session, *arguments):
        calls[event] += 1
        world.on_turn()
        if calls[event] == 2:
            raise RunError(f"made up, in {event}")
        return real(session, *arguments)

    monkeypatch.setattr(Session, event, failing)
    run = simulated(tmp_path / "run", world).run(monkeypatch)
    assert run.error is None or str(run.error) == f"made up, in {event}"
    world.on_turn()
