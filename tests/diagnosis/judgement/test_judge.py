"""The judgement as the page takes it."""

import json
import math

from benchmarks.made_run.made_run import make_run
from diagnosis.judgement.judge import FUNNEL, JUDGED, Judge, duration
from diagnosis.ledger_report import main as ledger_report
from diagnosis.records.run_log import RunLog
from diagnosis.what_if_report import main as what_if_report
from tests.diagnosis.judgement.queue_run import Plant
from tests.diagnosis.judgement.step_facts import settings, step

RUNNING = {"state": "running"}


def judged(steps, with_settings=None) -> Judge:
    judge = Judge(with_settings or settings())
    for facts in steps:
        judge.add_step(facts)
    return judge


def test_a_start_is_no_part_of_a_usual_step():
    """Two steps of 30 s that compile, then steps of 2 s: neither mean nor bottleneck is theirs."""
    start = [step(n, wall_s=30.0, learner={"compile": 28.0}) for n in (1, 2)]
    found = judged([*start, *map(step, range(3, 8))]).verdict(0.0, RUNNING)
    assert found["progress"]["step_s"] == 2.0 and found["progress"]["remaining_s"] == 186.0
    ended = judged([*start, *map(step, range(3, 8))]).verdict(0.0, {"state": "failed"})["progress"]
    assert ended["step_s"] == 2.0 and ended["remaining_s"] is None and "left" not in ended["text"]
    assert found["bottleneck"]["phase"] == "forward_backward"
    early = judged([*start, step(3)]).verdict(0.0, RUNNING)
    assert early["bottleneck"]["phase"] == "compile" and early["progress"]["step_s"] > 20


def test_where_steps_keep_compiling_they_are_the_usual_ones():
    compiling = [step(n, wall_s=30.0, learner={"compile": 28.0}) for n in range(1, 11, 2)]
    steps = sorted([*compiling, *map(step, range(2, 11, 2))], key=lambda facts: facts.step)
    found = judged(steps).verdict(0.0, RUNNING)
    assert found["bottleneck"]["phase"] == "compile" and found["progress"]["step_s"] == 16.0


def test_a_judgement_has_every_part_of_the_contract():
    funnel = {f"funnel/{name}": 100.0 - i for i, name in enumerate(FUNNEL)}
    judge = judged(step(n, metrics=funnel) for n in range(1, 21))
    found = judge.verdict(1041.0, RUNNING)
    assert found["step"] == 20 and found["time"] == 1041.0
    assert found["progress"] == {
        "step": 20,
        "total": 100,
        "fraction": 0.2,
        "step_s": 2.0,
        "remaining_s": 160.0,
        "text": "step 20 of 100, about 2 min 40 s left",
    }
    assert found["bottleneck"]["process"] == "learner"
    assert found["bottleneck"]["phase"] == "forward_backward"
    assert found["funnel"] == {
        "generated": 100.0,
        "scored": 99.0,
        "nonzero_advantage": 98.0,
        "unclipped": 97.0,
        "contributed": 96.0,
        "step": 20,
    }
    assert found["alerts"] == []
    assert {check["light"] for check in found["trust"]} <= {"ok", "none"}
    assert found["what_if"]["now"]["workers"] == 2


def test_before_the_first_step_nothing_is_known_and_nothing_fails():
    found = Judge(settings()).verdict(0.0, RUNNING)
    assert found["bottleneck"] is None and found["what_if"] is None and found["funnel"] is None
    assert found["trust"] == [] and found["alerts"] == []
    assert found["progress"]["step_s"] is None and found["progress"]["remaining_s"] is None


def test_a_step_that_only_evaluated_is_no_trained_step():
    evaluated = step(0, without=["time/train/update_s"], metrics={"time/eval_s": 1.0})
    found = judged([evaluated]).verdict(0.0, RUNNING)
    assert found["bottleneck"] is None and found["progress"]["text"] == "step 0 of 100"


def test_a_run_without_a_length_has_no_end_to_wait_for():
    found = judged([step(1)], settings(steps=0)).verdict(0.0, RUNNING)
    assert found["progress"]["text"] == "step 1"
    assert found["progress"]["remaining_s"] is None and found["progress"]["fraction"] == 0.0


def test_numbers_that_are_not_finite_reach_the_judgement_as_themselves():
    funnel = {f"funnel/{name}": math.nan for name in FUNNEL}
    nan = {"offpolicy/is_weight_raw_max": math.inf, "train/loss": math.nan}
    judge = judged([step(n, metrics=nan | funnel) for n in range(1, 12)])
    found = judge.verdict(0.0, RUNNING)
    assert math.isnan(found["funnel"]["generated"])
    assert found["alerts"][0]["id"] == "nonfinite"


def test_many_steps_at_once_are_judged_at_their_end():
    stale = {"rollout/zero_variance_fraction": 0.6}
    judge = judged(step(n, metrics=stale) for n in range(1, 2001))
    (alert,) = judge.verdict(0.0, {"state": "finished"})["alerts"]
    assert alert["id"] == "zero_variance" and alert["since_step"] == 2001 - JUDGED


def test_steps_while_a_worker_starts_count_in_no_prediction():
    judge = judged(Plant().steps({1: 1}, 10))
    before = judge.verdict(0.0, RUNNING)["what_if"]["error"]["count"]
    judge.set_workers(starting=True, hosts=1)
    judge.add_step(step(11, workers=[{"decode": 0.5}]))
    judge.set_workers(starting=False, hosts=1)
    judge.add_step(step(12, workers=[{"decode": 0.5}]))
    assert judge.verdict(0.0, RUNNING)["what_if"]["error"]["count"] == before + 1
    judge.set_workers(starting=False, hosts=0)


def test_workers_on_several_hosts_are_taken_to_share_better():
    cpu = settings(platform="cpu")
    steps = list(Plant().steps({1: 2}, 10))
    here, apart = judged(steps, cpu), judged(steps, cpu)
    apart.set_workers(starting=False, hosts=2)

    def more_s(judge):
        return judge.verdict(0.0, RUNNING)["what_if"]["options"][0]["step_s"]

    assert more_s(apart) < more_s(here)


def test_durations_are_short():
    assert [duration(s) for s in (25, 250, 12_000)] == ["25 s", "4 min 10 s", "3 h 20 min"]


def test_a_made_run_is_judged_from_its_files(tmp_path, capsys):
    make_run(tmp_path / "run", steps=30, workers=2)
    log = RunLog(tmp_path / "run")
    judge = judged(log.refresh().new_steps, log.settings)
    found = judge.verdict(0.0, log.status)
    assert found["step"] == 30 and found["what_if"]["error"]["median"] < 0.15
    assert not [alert for alert in found["alerts"] if alert["severity"] == "bad"]
    assert ledger_report(["--run", str(tmp_path / "run")]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("sums: 31 steps, 93 rows") and first.endswith("0 beyond 1 %")
    assert [line.split(":")[0] for line in others] == [
        f"unexplained of {name}" for name in log.processes
    ]
    assert what_if_report(["--run", str(tmp_path / "run")]) == 0
    assert "median error" in capsys.readouterr().out


def test_reports_say_what_is_wrong_with_a_folder(tmp_path, capsys):
    assert ledger_report(["--run", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert ledger_report(["--run", str(tmp_path)]) == 2
    assert what_if_report(["--run", str(tmp_path)]) == 2
    assert "no step that trained" in capsys.readouterr().err


def test_a_ledger_that_does_not_add_up_fails_its_report(tmp_path, capsys):
    make_run(tmp_path, steps=5, workers=1)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines()
    for found, instead in (('"idle": ', '"idle": 9'), ('"wall_s": ', '"wall_s": 9')):
        damaged = lines.copy()
        damaged[3] = lines[3].replace(found, instead)
        path.write_text("\n".join(damaged) + "\n")
        assert ledger_report(["--run", str(tmp_path)]) == 1
        assert "step 3" in capsys.readouterr().out.splitlines()[0]


def test_time_that_no_phase_explains_fails_the_report_where_it_is_a_habit(tmp_path, capsys):
    """Of 1, 1, 3, 8 and 8 % the median is 3 %, and two steps are beyond 5 %."""
    make_run(tmp_path, steps=5, workers=1)
    path = tmp_path / "ledger.jsonl"
    lines = []
    for share, line in zip((1, 1, 3, 8, 8), path.read_text().splitlines()[1:], strict=True):
        record = json.loads(line)
        busy = {"forward_backward": 1 - share / 100, "unexplained": share / 100}
        record["processes"]["learner"] = {k: v * record["wall_s"] for k, v in busy.items()}
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    assert ledger_report(["--run", str(tmp_path)]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "of learner" in one]
    assert line == (
        "unexplained of learner: median 3.00 %, worst 8.00 % in step 4, 2 of 5 steps beyond 5 %"
    )
    assert ledger_report(["--run", str(tmp_path), "--unexplained", "0.03"]) == 0
    assert ledger_report(["--run", str(tmp_path), "--unexplained", "0.0299"]) == 1
