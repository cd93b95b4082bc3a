"""What a look at a run's folder tells those who watch."""

from benchmarks.made_run.made_run import MadeRun
from benchmarks.made_run.made_steps import Plan
from dashboard.runs.live import Live


def told_of_logs(live):
    return [(kind, data) for kind, data in live.look() if kind in ("timeline", "samples")]


def test_a_look_tells_once_how_far_timeline_and_samples_are(tmp_path):
    live = Live(tmp_path)
    assert told_of_logs(live) == [("samples", {"total": 0})]
    made = MadeRun(tmp_path, Plan())
    made.write_step()
    assert told_of_logs(live) == [("timeline", {"step": 0}), ("samples", {"total": 200})]
    assert told_of_logs(live) == []
    made.write_step()
    live.spans.timeline()  # somebody asks before the next look
    assert told_of_logs(live) == [("timeline", {"step": 1}), ("samples", {"total": 204})]
    (tmp_path / "eval.jsonl").unlink()
    assert told_of_logs(live) == [("samples", {"total": 4})]


def test_lines_that_could_not_be_used_are_told_once(tmp_path, caplog):
    MadeRun(tmp_path, Plan()).write_step()
    live = Live(tmp_path)
    live.look()
    assert not caplog.records
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write("no json\n")
    for _ in range(2):
        live.look()
    (record,) = caplog.records
    assert record.getMessage() == "lines that could not be used, by file: {'ledger.jsonl': 1}"
