"""The command line up to where Ray would start."""

import datetime
import json
import os
import pathlib
import subprocess
import sys

import pytest

from driver import cli
from driver.config.load_config import load
from driver.config.paths import locate
from driver.config.prepare import prepare
from driver.config.resume_identity import identity_of, write_identity

ROOT = pathlib.Path(__file__).parents[2]
DEMO = ROOT / "deploy" / "demo" / "model"
LAST_YEAR = datetime.datetime(2025, 1, 31, 23, 59, 59, tzinfo=datetime.UTC)
TEMPLATE = (
    "{{ 'Today Date: ' + strftime_now('FORMAT') + '\\n' }}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)
YAML = """
run: {name: sums, steps: 2, output_dir: OUT}
model: {path: MODEL, chat_template: "TEMPLATE"}
data: {train: {source: DATA}}
rollout: {prompts_per_step: 2, completions_per_prompt: 4, max_prompt_tokens: 128,
  max_completion_tokens: 48, decode: {slots: 8}}
eval: {at_start: false, at_end: false}
placement: {platform: cpu}
"""


def test_a_variable_that_jax_cannot_read_is_one_message():
    ended = subprocess.run(
        [sys.executable, "-m", "driver", "--dry-run"],
        cwd=ROOT,
        env={**os.environ, "JAX_ENABLE_X64": "banana"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "'banana'" in ended.stderr and "JAX_ENABLE_X64" in ended.stderr


def test_a_preset_names_what_it_replaces_in_the_file(run_file, capsys):
    file = pathlib.Path(run_file("%Y"))
    file.write_text(file.read_text() + "algorithm: {entropy_coef: 0.25}\n")
    assert cli.main(["--config", str(file), "--preset", "dapo", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("preset dapo: ")
    assert "so that entropy_coef=0.25 of it does not count" in said


@pytest.fixture
def run_file(tmp_path):
    """Writes the configuration of a run whose template reads the clock; returns its path."""

    def write(format):
        data = tmp_path / "sums.jsonl"
        records = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(4)]
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        text = YAML.replace("TEMPLATE", TEMPLATE.replace("FORMAT", format))
        for name, path in (("OUT", tmp_path / "out"), ("MODEL", DEMO), ("DATA", data)):
            text = text.replace(name, str(path))
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return str(file)

    return write


@pytest.mark.parametrize("format", ["%d %b %Y", "%Y-%m-%d %H:%M:%S", "%s"])
def test_a_run_is_resumed_at_another_time_N16(run_file, tmp_path, capsys, format):
    file = run_file(format)
    config = locate(load(file))
    first = prepare(config, LAST_YEAR)
    (tmp_path / "out").mkdir()
    write_identity(
        tmp_path / "out", identity_of(config, first.model, first.data, first.order), LAST_YEAR
    )
    assert cli.main(["--config", file, "--resume", "--dry-run"]) == 0
    assert "clock, which stands at 2025-01-31 23:59:59+00:00" in capsys.readouterr().out


def test_a_run_without_a_moment_is_resumed_with_the_present_one_N16(run_file, tmp_path):
    file = run_file("%Y")
    config = locate(load(file))
    first = prepare(config)
    (tmp_path / "out").mkdir()
    identity = identity_of(config, first.model, first.data, first.order)
    (tmp_path / "out" / "identity.json").write_text(json.dumps(identity))
    assert cli.main(["--config", file, "--resume", "--dry-run"]) == 0


class Run:
    """A run of two prompts that has taken its first step."""

    def __init__(self, folder: pathlib.Path):
        self.file, self.folder = folder / "run.yaml", folder / "out"
        self.sums = folder / "sums.jsonl"
        self.file.write_text(
            f"run: {{output_dir: {self.folder}}}\nmodel: {{path: {DEMO}}}\n"
            "rollout: {max_prompt_tokens: 64, max_completion_tokens: 64}\n"
            f"data: {{train: {{source: {self.sums}}}, eval: {{source: {self.sums}}}}}\n"
        )
        self.write(["10", "7"])
        config = load(str(self.file))
        prepared = prepare(config)
        self.folder.mkdir()
        marks = identity_of(config, prepared.model, prepared.data, prepared.order)
        write_identity(self.folder, marks, LAST_YEAR)

    def write(self, answers):
        """Replaces the data."""
        records = [{"question": f"3 + {i} =", "answer": each} for i, each in enumerate(answers)]
        self.sums.write_text("".join(json.dumps(record) + "\n" for record in records))

    def resume(self, *overrides) -> int:
        """Checks whether the run can be resumed; returns the exit code."""
        sets = [f"--set={override}" for override in ("run.steps=2", *overrides)]
        return cli.main(["--config", str(self.file), "--resume", "--dry-run", *sets])


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_resume_with_other_answers_is_refused_N24(run, capsys):
    assert run.resume() == 0
    run.write(["10", "8"])
    assert run.resume() == 2
    said = capsys.readouterr().err
    assert "other answers of data.train and answers of data.eval" in said
    assert "or start a new run" in said


def test_a_resume_with_another_evaluation_set_is_refused(run, capsys):
    assert run.resume("data.eval.size=1") == 2
    assert "other prompts of data.eval" in capsys.readouterr().err


def test_a_run_of_an_older_version_resumes_and_is_told_what_was_not_compared(run, capsys):
    path = run.folder / "identity.json"
    old = {k: v for k, v in json.loads(path.read_text()).items() if "eval" not in k}
    del old["answers"], old["records"]
    path.write_text(json.dumps(old))
    run.write(["10", "8"])
    assert run.resume() == 0
    assert "note: this run did not record its answers of data.train, records of" in (
        capsys.readouterr().out
    )
    assert json.loads(path.read_text()) == old
