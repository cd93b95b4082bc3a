"""What a run has written down never steers the terminal, and never ends a command."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from driver.config.yaml_text import parse_yaml
from driver.reports.status import ExitCode, StatusFile
from driver.terminal.harmless import Harmless, make_harmless
from driver.terminal.step_table import StepView
from tests.deadlines import HANG_S

HOSTILE = "\x1b[2J\x1bc\x1b]0;title\x07\x9bright\rwrong"


def test_a_line_of_a_run_has_no_control_characters():
    out = io.StringIO()
    with StepView("demo", 60, make_harmless(Console(file=out, force_terminal=False))) as view:
        view.say(f"step 1: {HOSTILE}")
    text = out.getvalue()
    assert text.startswith("step 1: \ufffd[2J\ufffdc\ufffd]0;title")
    assert not set(text) & set("\x1b\x07\x9b\r")


def test_colours_of_our_own_stay():
    out = io.StringIO()
    console = make_harmless(Console(file=out, force_terminal=True, color_system="standard"))
    console.print(Text("x\x1b[2J", style="red"))
    assert out.getvalue() == "\x1b[31mx\ufffd[2J\x1b[0m\n"


def test_a_name_in_a_live_table_has_no_control_characters():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=150)
    with StepView(f"demo{HOSTILE}", 60, make_harmless(console)):
        pass
    assert "\x1b[2J" not in out.getvalue() and "\x1bc" not in out.getvalue()
    assert "\x9b" not in out.getvalue() and "demo\ufffd[2J" in out.getvalue()


def test_output_of_actors_above_a_live_table_has_no_control_characters(monkeypatch):
    out = io.StringIO()
    console = make_harmless(Console(file=out, force_terminal=True, color_system=None))
    monkeypatch.setattr("sys.stdout", io.StringIO())
    with Live(Harmless(Text("table")), console=console, auto_refresh=False):
        print("(RolloutActor pid=1) \x1bc\x9b2J noise")  # what Ray does with lines of its log
    text = out.getvalue()
    assert "noise" in text and "\x1bc" not in text and "\x9b" not in text


def output_of(*arguments, encoding):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_that_cannot_encode_a_name_is_no_traceback(tmp_path, encoding):
    StatusFile(tmp_path, run="é 日", run_id="demo-1").end(ExitCode.FAILED, f"日{HOSTILE}")
    shown = output_of("driver.top", "--run", str(tmp_path), encoding=encoding)
    assert b"\\u65e5" in shown and not set(shown) & set(b"\x1b\x07\r")


def test_a_configuration_that_is_printed_into_a_file_is_unchanged():
    prompt = "é 日 \u202e"
    arguments = ("driver", "--print-config", "--set", f"data.system_prompt={prompt}")
    printed = parse_yaml(output_of(*arguments, encoding="ascii").decode())
    assert printed["data"]["system_prompt"] == prompt
