"""`python -m driver.top` against a folder that is written by hand, and a real control service."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from driver.fleet.control_server import ControlBox, offer_control
from driver.reports.status import ExitCode, StatusFile
from driver.terminal.top import ALERTS_SHOWN, FleetView, Top, _alerts, main
from rollout_worker.config.rollout_config import WorkersConfig
from services.control.messages import WorkerState, WorkerStatus
from services.wire.tls import RunAuthority
from tests.deadlines import HANG_S

CONFIG = """\
run: {steps: 20}
rollout: {prompts_per_step: 8, completions_per_prompt: 4, max_completion_tokens: 64}
placement: {platform: cpu}
"""


def write_steps(folder, first, last, **metrics):
    """Appends steps: the learner works for 1 of 2 s, the worker decodes for 0.5 s before."""
    with (folder / "ledger.jsonl").open("a") as ledger, (folder / "metrics.jsonl").open("a") as log:
        for step in range(first, last + 1):
            record = {
                "step": step,
                "wall_s": 2.0,
                "processes": {
                    "learner": {"forward_backward": 1.0, "idle": 1.0},
                    "rollout-0": {"decode": 0.5, "idle": 1.5},
                },
                "overlap_s": {},
                "groups": {},
                "outstanding": 0,
                "warnings": [],
            }
            line = {
                "step": step,
                "time": time.time(),
                "time/train/update_s": 1.0,
                "time/train/rollout_generate_s": 0.9,
                "reward/total/mean": step / 20,
                "rollout/zero_variance_fraction": 0.75,
                **metrics,
            }
            ledger.write(json.dumps(record) + "\n")
            log.write(json.dumps(line) + "\n")


@pytest.fixture
def folder(tmp_path):
    """Of a run that has closed ten of twenty steps; this process is its driver."""
    StatusFile(tmp_path, run="demo", run_id="demo-1")
    (tmp_path / "config.yaml").write_text(CONFIG)
    write_steps(tmp_path, 1, 10)
    return tmp_path


@contextlib.contextmanager
def control(folder):
    """A driver that reports one worker."""
    box = ControlBox(WorkersConfig(min=1, max=2))
    worker = WorkerStatus(
        name="rollout-0", state=WorkerState.WORKING, policy_version=9, pid=77, host="h1"
    )
    box.show_fleet(dataclasses.replace(box.fleet(), step=10, policy_version=10, workers=(worker,)))
    authority = RunAuthority.create("demo-1")
    with offer_control(folder, authority, box, bind_host="127.0.0.1", driver_host="127.0.0.1"):
        yield


def test_it_prints_once_where_there_is_no_terminal(folder, capsys):
    with control(folder):
        assert main(["--run", str(folder)]) == ExitCode.FINISHED
    text = capsys.readouterr().out
    assert "demo running" in text
    assert "step 10 of 20" in text and "about 20 s left" in text
    assert "50 % at work" in text and "critical path" in text
    assert "forward, backward of the learner takes 50 % of a step (1.00 of 2.00 s)" in text
    assert "77 on h1" in text and "workers ready: 1 of 1" in text
    assert "75 % of the groups have equal rewards and no learning signal (since step 5)" in text
    assert "algorithm.zero_variance=mask" in text
    (reward,) = [line for line in text.splitlines() if line.startswith("reward")]
    assert "0.5" in reward and "▁" in reward and "█" in reward
    assert "\x1b" not in text


def test_without_a_driver_that_answers_it_says_why(folder, capsys):
    assert main(["--run", str(folder), "--once"]) == 0
    text = capsys.readouterr().out
    assert "workers: " in text and "control" in text


def test_a_run_that_is_over_ends_with_a_line_that_says_how(folder, capsys):
    status = json.loads((folder / "status.json").read_text())
    for state, end in (
        ("finished", "the run finished after step 10"),
        ("failed", "the run failed after step 10: no space left"),
    ):
        reason = "no space left" if state == "failed" else ""
        changed = status | {"state": state, "step": 10, "reason": reason}
        (folder / "status.json").write_text(json.dumps(changed))
        assert main(["--run", str(folder)]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == end and ", about" not in out


def test_a_run_whose_driver_died_shows_how_to_go_on(folder, capsys):
    ended = subprocess.Popen(["true"])
    ended.wait()
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"pid": ended.pid, "step": 10}))
    assert main(["--run", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the driver ended without a final status; go on with --resume after step 10"
    )


def test_a_run_that_went_back_is_judged_by_the_steps_that_it_has(folder):
    """A resume takes lines away: what stood because of those stands no more."""
    write_steps(folder, 11, 12, **{"train/loss": "NaN", "nonfinite": ["train/loss"]})
    top = Top(folder)
    top.refresh()
    assert "not finite" in drawn(top)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        kept = (folder / name).read_text().splitlines(keepends=True)[:10]
        (folder / f"{name}.new").write_text("".join(kept))
        (folder / f"{name}.new").replace(folder / name)
    write_steps(folder, 11, 11)
    top.refresh()
    assert "not finite" not in drawn(top) and "step 11 of 20" in drawn(top)


def test_the_driver_that_resumes_is_asked_like_the_one_before(folder):
    view = FleetView(folder)
    with contextlib.closing(view):
        for _ in range(2):
            with control(folder):
                fleet = view.poll_fleet()
                assert fleet is not None and fleet.step == 10 and not view.why
            assert view.poll_fleet() is None and view.why


def drawn(top: Top) -> str:
    console = Console(width=120, file=io.StringIO(), no_color=True)
    with console.capture() as capture:
        console.print(top.render(120, coloured=False, now=time.time()))
    return capture.get()


def test_the_time_left_is_that_of_the_page(folder, capsys):
    """Steps that start processes and compile are no part of it."""
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first |= {"wall_s": 99.0, "processes": {"learner": {"compile": 97.0, "idle": 2.0}}}
    (folder / "ledger.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    assert main(["--run", str(folder)]) == 0
    assert "about 20 s left" in capsys.readouterr().out


def test_a_run_without_a_step_is_shown_too(tmp_path, capsys):
    StatusFile(tmp_path, run="demo", run_id="demo-1")
    assert main(["--run", str(tmp_path)]) == 0
    assert "no step was closed yet" in capsys.readouterr().out


def test_text_of_a_run_is_never_read_as_markup(folder, capsys):
    status = json.loads((folder / "status.json").read_text())
    changed = status | {"run": "[bold]x[/nonsense]", "state": "failed", "reason": "[red]no"}
    (folder / "status.json").write_text(json.dumps(changed))
    assert main(["--run", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "[bold]x[/nonsense]" in text and "[red]no" in text


def test_what_is_no_run_is_named(tmp_path, capsys):
    assert main(["--run", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["--run", str(tmp_path)]) == 2
    assert "holds no status.json" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "x", "inf"])
def test_an_impossible_pause_is_an_error_of_usage(folder, value):
    with pytest.raises(SystemExit) as end:
        main(["--run", str(folder), "--every", value])
    assert end.value.code == 2


def test_on_a_terminal_it_draws_until_the_run_ends(folder):
    """New steps show, and the end of the run ends it."""
    out = io.StringIO()
    looks = []

    class Screen(Console):
        def print(self, *args, **options):
            super().print(*args, **options)
            if not looks:
                looks.append(1)
                write_steps(folder, 11, 20)
                status = json.loads((folder / "status.json").read_text())
                ended = status | {"state": "finished", "step": 20}
                (folder / "status.json").write_text(json.dumps(ended))

    console = Screen(file=out, force_terminal=True, width=120, height=60)
    assert main(["--run", str(folder), "--every", "0.1"], console) == 0
    assert out.getvalue().rstrip().endswith("the run finished after step 20")
    assert "20 of 20" in out.getvalue()


@pytest.mark.slow
def test_ctrl_c_ends_and_the_last_state_stays_visible(folder):
    """On a real terminal, as a person would."""
    screen, end = pty.openpty()
    process = subprocess.Popen(
        # Whoever runs the tests in the background may have had SIGINT ignored.
        ["env", "--default-signal=INT", sys.executable, "-m", "driver.top", "--run", str(folder)],
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    )
    os.close(end)
    seen = b""
    deadline = time.monotonic() + HANG_S
    while b"critical path" not in seen and time.monotonic() < deadline:
        seen += os.read(screen, 65536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # a terminal whose program is gone
        while select.select([screen], [], [], 30)[0] and (chunk := os.read(screen, 65536)):
            seen += chunk
    assert process.wait(HANG_S) == 0
    assert b"Traceback" not in seen and b"critical path" in seen


def test_alerts_have_the_words_of_the_page():
    alert = {"text": "it is late", "advice": "wait", "since_step": 3}
    words = {"bad": "✖ act", "warn": "▲ look", "info": "◆ note"}
    shown = [str(line) for line in _alerts([alert | {"severity": one} for one in words])]
    assert shown == [f"{word}: it is late (since step 3)\n  wait" for word in words.values()]
    many = [str(line) for line in _alerts([alert | {"severity": "warn"}] * (ALERTS_SHOWN + 3))]
    assert len(many) == ALERTS_SHOWN + 1 and many[-1] == "and 3 more"
