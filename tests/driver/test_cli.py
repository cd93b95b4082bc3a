"""The command line up to where Ray would start."""

import datetime
import json
import pathlib

import pytest

from driver import cli
from driver.config.load_config import load
from driver.config.paths import locate
from driver.config.prepare import prepare
from driver.config.resume_identity import identity_of, write_identity

DEMO = pathlib.Path(__file__).parents[2] / "deploy" / "demo" / "model"
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
    write_identity(tmp_path / "out", identity_of(config, first.model, first.digest), LAST_YEAR)
    assert cli.main(["--config", file, "--resume", "--dry-run"]) == 0
    assert "clock, which stands at 2025-01-31 23:59:59+00:00" in capsys.readouterr().out


def test_a_run_without_a_moment_is_resumed_with_the_present_one_N16(run_file, tmp_path):
    file = run_file("%Y")
    config = locate(load(file))
    first = prepare(config)
    (tmp_path / "out").mkdir()
    identity = identity_of(config, first.model, first.digest)
    (tmp_path / "out" / "identity.json").write_text(json.dumps(identity))
    assert cli.main(["--config", file, "--resume", "--dry-run"]) == 0
