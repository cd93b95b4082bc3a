"""The checks of `python -m deploy.chaos` on files written by hand, its faults, the soak's slope."""

import collections
import dataclasses
import json
import re

import numpy as np
import pytest
import safetensors.numpy

from benchmarks.chaos import cli, run_checks, soak
from benchmarks.chaos.campaign import (
    HOST_NOTICED_S,
    RECOVERY_S,
    Campaign,
    Outcome,
    Recovery,
    compare_runs,
    sum_of_outcomes,
)
from benchmarks.chaos.cli import SHORT_FORMS, WHOLE_FORMS
from benchmarks.chaos.open_steps import AIMS
from benchmarks.chaos.ray_head import SPREAD
from benchmarks.chaos.schedule import (
    AT_CHECKPOINTS,
    FIRST_STEP,
    HOST_LOSSES,
    IN_EPISODES,
    OF_COMPLETIONS,
    PAUSE_S,
    PAUSES,
    POINTS,
    SHORT,
    FaultKind,
    draw_faults,
    recovered_by,
)
from services.process import failpoints

STEPS = 3


@pytest.fixture
def folder(tmp_path):
    """What an orderly run of three steps with two groups each leaves."""

    def write(name, lines):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    groups = lambda step: [f"g{2 * step - 2:08d}", f"g{2 * step - 1:08d}"]
    write(
        "ledger.jsonl",
        [
            {"step": step, "groups": {"trained": groups(step)}, "outstanding": 0}
            for step in range(1, STEPS + 1)
        ],
    )
    write(
        "metrics.jsonl",
        [
            {"step": step, "train/loss": 0.5 / step, "offpolicy/staleness_max": 0.0}
            for step in range(1, STEPS + 1)
        ],
    )
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000003" / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-00000003" / "certificate.json").write_text(
        json.dumps(dict.fromkeys(run_checks.CERTIFIED, "00ff") | {"ledger": "of its own"})
    )
    (tmp_path / "checkpoints" / "step-00000002.writing").mkdir()
    (tmp_path / "checkpoints" / "step-00000002.writing" / "manifest.json").write_text("{}")
    (tmp_path / "export").mkdir()
    safetensors.numpy.save_file(
        {"w": np.array([1.0, -0.0, np.nan], np.float32)}, tmp_path / "export" / "model.safetensors"
    )
    return tmp_path


def change(folder, name: str, edit) -> run_checks.RunFiles:
    """Reads the run with the lines of one log edited."""
    path = folder / name
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in edit(lines)))
    return run_checks.read_run(folder)


EXPECTED = [f"g{index:08d}" for index in range(2 * STEPS)]


def test_an_orderly_run_passes(folder):
    accounting = run_checks.check_accounting(
        run_checks.read_run(folder), steps=STEPS, expected=EXPECTED
    )
    assert accounting == run_checks.Accounting(lost=(), duplicated=(), problems=())
    assert run_checks.check_accounting(run_checks.read_run(folder), steps=STEPS) == accounting


def test_superseded_lines_and_a_line_being_written_do_not_count(folder):
    (folder / "ledger.superseded.jsonl").write_text((folder / "ledger.jsonl").read_text())
    with (folder / "ledger.jsonl").open("a") as file:
        file.write('{"step": 4, "groups": {"trai')
    assert not run_checks.check_accounting(
        run_checks.read_run(folder), steps=STEPS, expected=EXPECTED
    ).problems


def test_a_lost_group_is_found_with_and_without_knowing_what_to_expect(folder):
    def lose(lines):
        lines[1]["groups"]["trained"].pop(0)
        return lines

    run = change(folder, "ledger.jsonl", lose)
    assert run_checks.check_accounting(run, steps=STEPS, expected=EXPECTED).lost == ("g00000002",)
    assert run_checks.check_accounting(run, steps=STEPS).lost == ("g00000002",)


def test_a_group_that_is_still_under_way_is_not_lost(folder):
    def leave_open(lines):
        lines[1]["groups"]["trained"].pop(0)
        lines[2]["outstanding"] = 1
        return lines

    run = change(folder, "ledger.jsonl", leave_open)
    assert run_checks.check_accounting(run, steps=STEPS).lost == ()
    assert run_checks.check_accounting(run, steps=STEPS, expected=EXPECTED).lost == ("g00000002",)


@pytest.mark.parametrize("state", ["trained", "dropped_stale"])
def test_a_group_that_ended_twice_is_found(folder, state):
    def repeat(lines):
        lines[2]["groups"].setdefault(state, []).append("g00000001")
        return lines

    run = change(folder, "ledger.jsonl", repeat)
    assert run_checks.check_accounting(run, steps=STEPS, expected=EXPECTED).duplicated == (
        "g00000001",
    )


def test_a_second_delivery_that_was_refused_is_no_second_end(folder):
    def deliver(lines):
        lines[2]["groups"]["duplicate"] = ["g00000001"]
        return lines

    assert not run_checks.check_accounting(
        change(folder, "ledger.jsonl", deliver), steps=STEPS
    ).duplicated


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda lines: lines[:-1], r"missing \[3\]"),
        (lambda lines: [*lines, lines[-1]], r"repeated \[3\]"),
        (lambda lines: [lines[0], lines[2], lines[1]], "in order"),
        (lambda lines: [], "last none"),
    ],
)
@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.jsonl"])
def test_steps_must_be_there_once_and_in_order(folder, name, edit, message):
    run = change(folder, name, edit)
    (problem,) = run_checks.check_accounting(run, steps=STEPS).problems
    assert problem.startswith(f"{name} should have") and re.search(message, problem)


def test_a_run_without_its_last_checkpoint_or_its_policy_is_not_whole(folder):
    (folder / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    (folder / "export" / "model.safetensors").unlink()
    problems = run_checks.check_accounting(run_checks.read_run(folder), steps=STEPS).problems
    assert problems == ("no checkpoint of step 3; there are []", "no policy was exported")


def test_staleness_is_held_in_every_step():
    metrics = [{"step": step, "offpolicy/staleness_max": float(step)} for step in (1, 2, 3)]
    (problem,) = run_checks.check_staleness(metrics, 2)
    assert problem.startswith("step 3 trained on a group 3 versions old")


def test_parameters_are_compared_by_their_bits():
    one = {"a": np.array([0.0, np.nan], np.float32), "b": np.ones(2, np.float32)}
    assert run_checks.different_tensors(one, {k: v.copy() for k, v in one.items()}) == []
    assert run_checks.different_tensors(one, one | {"a": np.array([-0.0, np.nan], np.float32)}) == [
        "a"
    ]
    assert run_checks.different_tensors(one, one | {"b": np.ones(2, np.float64)}) == ["b"]
    assert run_checks.different_tensors(one, {"a": one["a"], "c": one["b"]}) == ["b", "c"]


def campaign(mode: str) -> Campaign:
    return Campaign(steps=STEPS, every_steps=1, mode=mode, faults=())


def test_a_synchronous_campaign_wants_equal_bits_and_names_the_divergence(folder):
    undisturbed = run_checks.read_run(folder)
    assert compare_runs(campaign("sync"), undisturbed, run_checks.read_run(folder), 0, []).passed

    def drift(lines):
        lines[1]["train/loss"] += 1e-9
        return lines

    other = change(folder, "metrics.jsonl", drift)
    other.parameters["w"][0] = 2
    outcome = compare_runs(campaign("sync"), undisturbed, other, 0, [])
    assert not outcome.passed and outcome.parameters_equal is False
    assert "1 tensors differ, first w" in outcome.problems[0]
    assert "diverge at step 2: train/loss" in outcome.problems[1]
    assert compare_runs(campaign("async"), undisturbed, other, 0, []).passed


@pytest.mark.parametrize("part", run_checks.CERTIFIED)
def test_a_checkpoint_that_differs_where_an_export_cannot_show_it_is_found(folder, part):
    """Exports are rounded to 16 bits; the master weights and the optimiser are not."""
    undisturbed, other = run_checks.read_run(folder), run_checks.read_run(folder)
    other.certificate[part] = "ff00"
    outcome = compare_runs(campaign("sync"), undisturbed, other, 0, [])
    assert outcome.parameters_equal is False
    assert outcome.problems == (f"the last checkpoints differ in {part}",)
    other.certificate.pop(part)
    assert not compare_runs(campaign("sync"), other, undisturbed, 0, []).passed
    assert compare_runs(campaign("async"), undisturbed, other, 0, []).passed


def with_errors(run: run_checks.RunFiles, step: int, *errors: str) -> run_checks.RunFiles:
    """The run as it is where episodes of a step ended with these errors."""
    metrics = [
        line | {run_checks.ERRORS: float(len(errors) if line["step"] == step else 0)}
        for line in run.metrics
    ]
    samples = [{"step": step, "reward_error": error} for error in (*errors, "")]
    return dataclasses.replace(run, metrics=metrics, samples=samples)


def hanging_campaign() -> Campaign:
    """Of episodes, one of whose environments hangs in step 2."""
    [fault] = draw_faults(0, 1, steps=STEPS + 2, every_steps=1, kinds=(FaultKind.ENVIRONMENT_HUNG,))
    fault = dataclasses.replace(fault, step=1)
    return Campaign(steps=STEPS, every_steps=1, mode="sync", faults=(fault,), episodes=True)


HUNG = "environment_error: step 1: no result within 4 s"


def test_an_environment_that_hangs_ends_its_episodes_with_the_error_that_is_documented(folder):
    run = with_errors(run_checks.read_run(folder), 2, HUNG, HUNG)
    assert compare_runs(hanging_campaign(), run, run, 1, []).passed


@pytest.mark.parametrize(
    "step, errors",
    [
        (2, ()),
        (3, (HUNG,)),
        (2, (HUNG, "environment_error: reset: no result within 4 s")),
        (2, ("environment_error: step 1: child was killed by SIGKILL",)),
    ],
)
def test_errors_of_episodes_that_should_not_be_there_are_found(folder, step, errors):
    run = with_errors(run_checks.read_run(folder), step, *errors)
    outcome = compare_runs(hanging_campaign(), run, run, 1, [])
    assert outcome.parameters_equal and not outcome.passed
    assert all("errors of rewards" in problem for problem in outcome.problems)


def test_a_run_with_another_number_of_errors_diverges(folder):
    run = run_checks.read_run(folder)
    undisturbed, other = (with_errors(run, 2, *[HUNG] * count) for count in (1, 2))
    problems = compare_runs(hanging_campaign(), undisturbed, other, 1, []).problems
    assert problems == ("the runs diverge at step 2: reward_error/count is 1.0 and 2.0",)


def outcome(equal: bool | None, lost: int = 0) -> Outcome:
    return Outcome(hit=2, lost=lost, duplicated=1, parameters_equal=equal, problems=())


def test_several_campaigns_pass_as_one_where_each_does():
    both = sum_of_outcomes([outcome(True, lost=3), outcome(True)])
    assert (both.hit, both.lost, both.duplicated, both.parameters_equal) == (4, 3, 2, True)
    assert sum_of_outcomes([outcome(True), outcome(False)]).parameters_equal is False
    assert sum_of_outcomes([outcome(True), outcome(None)]).parameters_equal is None


def test_a_slow_recovery_fails_a_campaign_whose_accounting_is_right(folder):
    run = run_checks.read_run(folder)
    assert not compare_runs(campaign("sync"), run, run, 1, ["fault 1: recovered in 61 s"]).passed


def test_the_last_line_is_for_machines():
    line = run_checks.last_line(
        faults=20, lost=0, duplicated=0, parameters_equal=True, seconds=411.7
    )
    assert line == "chaos: faults 20, lost 0, duplicated 0, parameters equal, seconds 412"


def test_equal_seeds_draw_equal_faults_and_others_draw_others():
    sizes = {"steps": 60, "every_steps": 5, "kinds": OF_COMPLETIONS}
    drawn = [draw_faults(seed, 20, **sizes) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_drawn_equally_often_and_there_is_time_to_recover(seed):
    for form in (*WHOLE_FORMS, *SHORT_FORMS):
        steps, count, every_steps, kinds, _ = form
        faults = draw_faults(seed, count, steps=steps, every_steps=every_steps, kinds=kinds)
        counts = collections.Counter(fault.kind for fault in faults)
        assert counts == dict.fromkeys(kinds, 1)
        assert [fault.number for fault in faults] == list(range(1, count + 1))
        at = [fault.step for fault in faults]
        assert at == sorted(at) and at[0] >= FIRST_STEP
        assert recovered_by(at, [fault.kind for fault in faults], every_steps) < steps


def test_both_runs_of_the_whole_form_are_hit_by_every_kind_that_fits_them():
    of_completions, of_episodes = WHOLE_FORMS
    assert {*of_completions.kinds, *of_episodes.kinds} == {*FaultKind}
    assert not {*of_completions.kinds} & {*of_episodes.kinds}


def test_kinds_that_are_named_go_to_the_runs_that_they_are_made_for(capsys):
    assert cli.main(["--only", "disk_full,environment_killed", "--faults", "1", "--list"]) == 0
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()] == [
        FaultKind.DISK_FULL.value,
        FaultKind.ENVIRONMENT_KILLED.value,
    ]
    for given in (["--undisturbed", "earlier"], ["--faults", "27"], ["--steps", "40"]):
        assert cli.main([*given, "--list"]) == 2
        assert f"{given[0]} is of one campaign, and there are two" in capsys.readouterr().err


def test_pauses_are_longer_than_a_silence_that_means_death():
    pauses = draw_faults(0, 3, steps=20, every_steps=4, kinds=PAUSES)
    assert {fault.kind for fault in pauses} == {*PAUSES}
    assert [fault.seconds for fault in pauses] == [PAUSE_S] * 3
    assert {Recovery(fault=fault, seconds=1.0).allowed_s for fault in pauses} == {135.0}


def test_runs_are_spread_over_hosts_where_one_is_lost():
    [lost] = draw_faults(0, 1, steps=20, every_steps=4, kinds=HOST_LOSSES)
    spread = dataclasses.replace(campaign("sync"), faults=(lost,))
    assert spread.over_hosts and {*SPREAD} <= {*spread.settings}
    assert Recovery(fault=lost, seconds=1.0).allowed_s == RECOVERY_S + HOST_NOTICED_S
    assert not campaign("sync").over_hosts and not {*SPREAD} & {*campaign("sync").settings}


def test_recovery_counts_the_wait_for_a_checkpoint_and_for_the_fault_before():
    assert recovered_by([4], [FaultKind.DRIVER_KILLED], 5) == 6
    assert recovered_by([4], [FaultKind.DISK_FULL], 5) == 6
    assert recovered_by([5], [FaultKind.DISK_FULL], 5) == 11
    assert recovered_by([3, 3], [FaultKind.DRIVER_KILLED, FaultKind.DISK_FULL], 5) == 11


def test_more_faults_than_fit_are_refused():
    with pytest.raises(ValueError, match="20 faults do not fit into 30 steps"):
        draw_faults(0, 20, steps=30, every_steps=5)
    with pytest.raises(ValueError, match="0 faults do not fit"):
        draw_faults(0, 0, steps=60, every_steps=5)


def test_every_kind_is_made_by_a_point_that_exists_or_by_hand(tmp_path):
    for point, action in POINTS.values():
        failpoints.arm(tmp_path, point, f"skip 2 then {action}")
    assert set(AT_CHECKPOINTS) <= POINTS.keys() and set(SHORT) <= set(FaultKind)
    assert {*AIMS, FaultKind.ENVIRONMENT_HUNG} == {*IN_EPISODES}


def samples(rss_mb, descriptors) -> list[soak.Sample]:
    return [
        soak.Sample(at_s=float(at), rss_bytes=int(rss_mb(at) * 1e6), descriptors=descriptors(at))
        for at in range(600)
    ]


def test_growth_is_the_slope_after_the_warm_up_and_what_is_never_given_back():
    def settling(at):
        return 500 + min(at, 140) + 0.5 * at / 60

    grown = soak.growth(samples(settling, lambda at: 40 + at % 7))
    assert grown.mb_per_min == pytest.approx(0.5, abs=1e-3) and grown.descriptors == 0
    assert grown.problems == []
    leaking = soak.growth(samples(lambda at: 500 + 2 * at / 60, lambda at: 40 + at // 100 + at % 7))
    assert leaking.mb_per_min == pytest.approx(2, abs=1e-3) and leaking.descriptors == 4
    assert len(leaking.problems) == 2


def test_a_soak_too_short_for_a_slope_is_refused():
    with pytest.raises(ValueError, match="two cycles"):
        soak.growth(samples(lambda at: 1.0, lambda at: 1)[:12])
