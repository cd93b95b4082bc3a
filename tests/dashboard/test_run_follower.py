"""What a look at a run's folder tells those who watch."""

import asyncio
import threading

from benchmarks.made_run.made_run import MadeRun
from benchmarks.made_run.made_steps import RunPlan
from dashboard.runs.driver_client import no_fleet
from dashboard.runs.run_follower import RunFollower
from tests.deadlines import HANG_S


def told_of_logs(follower):
    return [(kind, data) for kind, data in follower.poll() if kind in ("timeline", "samples")]


def test_a_poll_reports_once_how_long_timeline_and_samples_are(tmp_path):
    follower = RunFollower(tmp_path)
    assert told_of_logs(follower) == [("samples", {"total": 0})]
    made = MadeRun(tmp_path, RunPlan())
    made.write_step()
    assert told_of_logs(follower) == [("timeline", {"step": 0}), ("samples", {"total": 200})]
    assert told_of_logs(follower) == []
    made.write_step()
    follower.timeline.timeline()  # somebody asks before the next look
    assert told_of_logs(follower) == [("timeline", {"step": 1}), ("samples", {"total": 204})]
    (tmp_path / "eval.jsonl").unlink()
    assert told_of_logs(follower) == [("samples", {"total": 4})]


def test_skipped_lines_are_logged_once(tmp_path, caplog):
    MadeRun(tmp_path, RunPlan()).write_step()
    follower = RunFollower(tmp_path)
    follower.poll()
    assert not caplog.records
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write("no json\n")
    for _ in range(2):
        follower.poll()
    (record,) = caplog.records
    assert record.getMessage() == "skipped invalid lines, by file: {'ledger.jsonl': 1}"


def test_a_viewer_that_joins_while_the_run_ends_sees_the_end(tmp_path, monkeypatch):
    made = MadeRun(tmp_path, RunPlan())
    made.write_step()
    made.progress()
    follower = RunFollower(tmp_path)
    asked, may_answer = threading.Event(), threading.Event()

    def slow_driver():
        asked.set()
        assert may_answer.wait(HANG_S)
        return no_fleet("it is slow")

    monkeypatch.setattr(follower._driver, "fleet", slow_driver)

    async def join_while_it_ends():
        await follower.publish_news()
        joining = asyncio.create_task(follower.join())
        await asyncio.to_thread(asked.wait, HANG_S)
        made.end("failed", "RuntimeError: no memory")
        await follower.publish_news()
        may_answer.set()
        viewer = await joining
        return b"".join(viewer.queue.get_nowait() or b"" for _ in range(viewer.queue.qsize()))

    assert b"no memory" in asyncio.run(join_while_it_ends())
