"""A run of the driver that loses processes, hosts and time, in a made-up world."""

import pytest

from learner.durable.spool import CLAIM_S
from tests.driver.simulated_run import MOMENT, SimulatedRun, World


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs the driver in a world."""

    def one(world: World, **changes) -> SimulatedRun:
        return SimulatedRun(tmp_path / "run", world, **changes).run(monkeypatch)

    return one


def finished(run: SimulatedRun, steps: int = 6) -> None:
    """Checks that a run took all its steps and trained each group once."""
    assert run.error is None, run.said
    assert sorted(run.world.trained) == [f"g{i:08d}" for i in range(4 * steps)]
    assert run.world.saved is not None and run.world.saved[0] == steps


def test_an_undisturbed_run_trains_every_group_once(start):
    finished(start(World()))


def test_the_end_of_a_driver_that_ray_ends_with_it_would_be_written_R10(start):
    assert (run := start(World())).watched == [run.folder]


def test_every_worker_is_started_with_the_moment_of_the_run_N16(start):
    world = World()
    world.at(30.0, lambda: world.process("rollout-1").end())
    start(world, steps=20)
    assert world.moments == [MOMENT] * 3


def test_a_run_of_two_workers_survives_the_loss_of_one_host_for_good_F02(start):
    world = World()
    world.at(30.0, lambda: world.lose_host("b"))
    run = start(world, steps=30)
    finished(run, 30)
    lost = run.said_of("rollout-1")
    assert [line for line in lost if "lost with its host b, restart 1 of 3" in line] == lost[1:2]
    assert len(run.said_of("restart ")) == 1, "one host, one event"
    (waits,) = run.said_of("rollout-1 waits for room", "b does not answer")
    assert waits.endswith("the run has 1 of 2 workers")
    assert world.process("rollout-1").host.name == "b", "nothing was started on the dead host"


def test_a_host_that_comes_later_gets_the_worker_that_waits_F02(start):
    world = World()
    world.at(30.0, lambda: world.lose_host("b"))
    world.at(150.0, lambda: world.add_host("c"))
    run = start(world, steps=60)
    finished(run, 60)
    assert run.said_of("rollout-1 has room on c and starts")
    assert [one.host.name for one in world.processes if one.name == "rollout-1"] == ["b", "c"]


def test_the_host_of_the_learner_may_be_lost_three_times_F02(start):
    world = World("learner a b s1 s2 s3")
    for n, name in enumerate(("learner", "s1", "s2")):
        world.at(40.0 + 90.0 * n, lambda name=name: world.lose_host(name))
    run = start(world, steps=60)
    finished(run, 60)
    learners = [one.host.name for one in world.processes if one.name == "learner"]
    assert learners == ["learner", "s1", "s2", "s3"], "none was started where a host was dead"
    assert len(run.said_of("the learner waits for room")) == 3, "and it says so"


def test_hosts_that_are_lost_do_not_use_up_the_restarts_of_crashes_F02(start):
    world = World("learner a b s1 s2 s3")
    for n, name in enumerate(("b", "s1", "s2")):
        world.at(30.0 + 100.0 * n, lambda name=name: world.lose_host(name))
    for n in range(3):
        world.at(300.0 + 20.0 * n, lambda: world.process("rollout-1").end())
    run = start(world, steps=120)
    finished(run, 120)
    assert run.said_of("rollout-1 failed, restart 3 of 3")


@pytest.mark.parametrize("lost, who", [("b", "rollout-1"), ("learner", "the learner")])
def test_a_host_that_vanishes_without_a_word_is_missed_in_half_a_minute_F02(start, lost, who):
    world = World("learner a b s1")
    world.at(41.3, lambda: world.lose_host(lost, silently=True))
    run = start(world, steps=40)
    finished(run, 40)
    (said,) = run.said_of(who, f"lost with its host {lost}, restart 1 of 3", "do not answer") or (
        run.said_of(who, f"lost with its host {lost}: restart 1 of 3", "do not answer")
    )
    assert run.said_at_s[run.said.index(said)] - 1_041.3 < 30.0


def test_two_workers_of_one_host_are_one_event_F02(start):
    world = World("learner a s1")
    world.bundles = {0: "learner", 1: "a", 2: "a"}
    world.at(30.0, lambda: world.lose_host("a"))
    world.at(100.0, lambda: world.bundles.update({1: "s1", 2: "s1"}))
    run = start(world, placement__worker_restarts=1)
    finished(run)
    assert len(run.said_of("was lost with its host a")) == 2
    assert len(run.said_of("restart ")) == 1


def test_without_any_worker_and_room_the_run_ends_in_a_checkpoint_F02(start):
    world = World()
    world.at(30.0, lambda: (world.lose_host("a"), world.lose_host("b")))
    run = start(world, steps=30, placement__resources_timeout_s=60.0)
    assert "no rollout worker is left, and none has had room for 150 s" in str(run.error)
    assert run.said_of("writing a checkpoint") and run.ended_in_checkpoint(3)


def test_a_learner_without_room_says_so_and_ends_the_run_in_time_F10(start):
    world = World()
    world.at(40.0, lambda: world.lose_host("learner"))
    run = start(world, steps=30, placement__resources_timeout_s=60.0)
    assert run.said_of("the learner waits for room (learner does not answer)")
    assert "no room for another learner came within 150 s" in str(run.error)
    assert "no host of the Ray cluster has 1 CPU free" in str(run.error)
    assert run.status["exit_code"] == 3


def test_a_post_mortem_knows_what_the_run_had_overcome(start):
    world = World()
    world.at(30.0, lambda: world.process("rollout-0").end())
    world.at(90.0, lambda: world.lose_host("learner"))
    run = start(world, steps=60, placement__resources_timeout_s=60.0)
    [evidence] = run.evidence
    [overcome] = [text for text in evidence.overcome_errors if "rollout-0 failed" in text]
    assert overcome not in evidence.worker_errors
    assert any("the learner died" in text for text in evidence.worker_errors)


def test_a_table_that_cannot_be_made_hides_no_error(start, monkeypatch):
    monkeypatch.setattr("driver.supervisor.Supervisor.tables", lambda _: {}["fleet"])
    world = World()
    world.at(40.0, lambda: world.lose_host("learner"))
    [evidence] = start(world, steps=30, placement__resources_timeout_s=60.0).evidence
    assert any("the learner died" in text for text in evidence.worker_errors)
    assert evidence.worker_errors[-1] == "the driver could not say more: KeyError: 'fleet'"


@pytest.mark.parametrize("evaluates", [0, 1])
def test_the_last_worker_failure_ends_in_the_announced_checkpoint_F07_R05(start, evaluates):
    world = World()
    world.at(37.0, lambda: world.process("rollout-0").end())
    run = start(world, steps=30, placement__worker_restarts=0, eval__every_steps=evaluates)
    assert str(run.error).startswith(
        "rollout-0 failed and placement.worker_restarts=0 is used up: its process ended"
    )
    assert run.said_of("writing a checkpoint") and run.ended_in_checkpoint(1)


@pytest.mark.parametrize("evaluates", [0, 1])
@pytest.mark.parametrize("who", ["rollout-0", "rollout-1", "both"])
def test_workers_that_go_on_failing_do_not_keep_the_checkpoint_from_being_written_F07_R05(
    start, who, evaluates
):
    world = World()
    for name in ["rollout-0", "rollout-1"] if who == "both" else [who]:
        for n in range(1_000):
            world.at(30.0 + 0.3 * n, lambda name=name: world.end_newest(name))
    run = start(world, steps=500, eval__every_steps=evaluates)
    assert "placement.worker_restarts=3 is used up" in str(run.error)
    assert len(run.said_of("writing a checkpoint")) == 1 and run.ended_in_checkpoint(1)


@pytest.mark.parametrize("who", ["rollout-0", "learner"])
def test_a_process_that_crashes_again_and_again_ends_the_run(start, who):
    world = World()
    for n in range(5):
        world.at(30.0 + 20.0 * n, lambda: world.process(who).end())
    run = start(world, steps=500)
    key = "worker_restarts" if who == "rollout-0" else "learner_restarts"
    assert f"placement.{key}=3 is used up" in str(run.error)
    assert len([one for one in world.processes if one.name == who]) == 4


@pytest.mark.parametrize("pause_s", [75.0, 90.0, 3_600.0])
@pytest.mark.parametrize("evaluates", [0, 1])
def test_a_driver_that_was_stopped_blames_nobody_R04(start, pause_s, evaluates):
    """On waking it sees no answer for a moment, as Ray has to read them first."""
    world = World()

    def pause():
        world.now_s += pause_s
        for process in world.processes:
            process.stopped = True
        world.at(1.0, lambda: [setattr(one, "stopped", False) for one in world.processes])

    for n in range(4):
        world.at(30.0 + n * 13.7, pause)
    run = start(world, steps=30, eval__every_steps=evaluates)
    finished(run, 30)
    assert not run.said_of("restart "), run.said
    assert len(world.processes) == 3


def test_a_learner_asks_for_the_port_of_the_one_before_F11(start):
    world = World()
    world.at(40.0, lambda: world.process("learner").end())
    run = start(world, steps=20)
    finished(run, 20)
    assert world.ports == [None, 4000]


def test_a_learner_may_wait_for_the_record_that_a_cut_off_one_still_holds_F03(start):
    world = World()
    world.restore_s = CLAIM_S + 30.0
    world.at(40.0, lambda: world.process("learner").end())
    run = start(world, steps=20, placement__startup_timeout_s=60.0)
    finished(run, 20)
    assert len(run.said_of("restart 1 of 3")) == 1


def test_a_learner_that_moves_where_the_folder_is_not_ends_the_run_with_the_reason(start):
    world = World("learner a b other")
    world.without_folder = {"other"}
    world.at(40.0, lambda: world.lose_host("learner"))
    run = start(world, steps=30)
    assert "is not there on other, where the learner runs" in str(run.error)
    assert run.status["exit_code"] == 1


@pytest.mark.parametrize("stopped_s", [22.0, 45.0])
def test_a_learner_that_answers_nobody_for_a_while_is_cut_off_from_nobody_F05(start, stopped_s):
    world = World()
    for n in range(3):
        world.at(40.3 + 70.0 * n, lambda: world.stop("learner", stopped_s))
    run = start(world, steps=60)
    finished(run, 60)
    assert not run.said_of("no answer from the learner"), run.said
    assert len(world.processes) == 3


def test_processes_that_end_while_the_driver_sleeps_use_up_no_restart_R04(start):
    """As on a laptop that is closed every night: each finds that nobody asks it anything."""
    world = World()

    def sleep():
        world.now_s += 600.0
        for process in world.processes:
            process.end()

    for n in range(5):
        world.at(60.0 + 800.0 * n, sleep)
    run = start(world, steps=400)
    finished(run, 400)
    assert not run.said_of("restart "), run.said_of("restart ")
    assert len(run.said_of("the learner", "ended while this driver was paused")) == 5


def test_a_host_of_the_learner_that_comes_and_goes_ends_the_run_in_time(start):
    world = World()

    def drop_out():
        for process in world.processes:
            if process.host.name == "learner":
                process.end()
        host = world.hosts["learner"]
        host.up = False
        world.at(40.0, lambda: setattr(host, "up", True))

    for n in range(30):
        world.at(60.0 + 200.0 * n, drop_out)
    run = start(world, steps=3_000)
    assert "placement.learner_restarts=3 is used up" in str(run.error)
