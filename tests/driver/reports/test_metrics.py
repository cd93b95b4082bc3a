import json

import numpy as np
import pytest

from driver.accounting.jsonl import JsonlLog, read_lines, strict_line
from driver.config.sections.log import WandbConfig
from driver.reports.metrics import MetricsLog, open_trackers

DISABLED = WandbConfig(mode="disabled")


def open_log(folder, wandb=DISABLED, **changes):
    arguments = {"run_id": "r1", "config": {"seed": 0}, "warn": pytest.fail} | changes
    return MetricsLog(folder, open_trackers(folder, wandb, **arguments))


def strict_load(line):
    def refuse(constant):
        raise AssertionError(f"bare {constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_o01_values_that_are_not_finite_are_strict_json_and_flagged(cases, tmp_path):
    values = {
        k: float(v) for k, v in cases("observability")["O01"]["input"]["metrics_python"].items()
    }
    log = open_log(tmp_path)
    written = log.log(3, values)
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = strict_load(line)
    assert record == written
    assert {key: record[key] for key in values} == {
        "loss": "NaN",
        "kl": "Infinity",
        "reward_mean": 0.5,
        "grad_norm": "-Infinity",
    }
    assert record["nonfinite"] == ["loss", "kl", "grad_norm"]
    assert record["step"] == 3


def test_finite_lines_are_not_flagged_and_numpy_becomes_plain():
    line = strict_line({"a": np.float32(0.5), "b": np.arange(2), "c": {"d": (np.int64(1), None)}})
    assert strict_load(line) == {"a": 0.5, "b": [0, 1], "c": {"d": [1, None]}}


def test_nested_bad_values_are_named_by_path():
    record = strict_load(strict_line({"x": {"y": [1.0, float("nan")]}}))
    assert record["nonfinite"] == ["x.y.1"]


def test_a_value_without_a_json_form_names_its_key():
    with pytest.raises(ValueError, match="metrics.loss is a object"):
        strict_line({"metrics": {"loss": object()}})


def test_each_line_is_on_disk_at_once(tmp_path):
    log = open_log(tmp_path)
    for step in (1, 2):
        log.log(step, {"reward/total/mean": 0.1 * step})
        assert [r["step"] for r in read_lines(tmp_path / "metrics.jsonl")] == list(
            range(1, step + 1)
        )
    log.close()


def test_o02_resume_rewinds_to_the_checkpoint_and_loses_nothing(tmp_path):
    log = open_log(tmp_path)
    for step in range(1, 13):
        log.log(step, {"loss": float(step)})
        log.log_samples(step, [{"completion": "a"}, {"completion": "b"}])
    log.log_eval(12, [{"prompt_id": 5}])
    log.close()

    log = open_log(tmp_path)
    assert log.resume_at(10) == 2 + 4 + 1
    log.log(11, {"loss": 110.0})
    log.close()
    metrics = read_lines(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in metrics] == [*range(1, 12)]
    assert metrics[-1]["loss"] == 110.0
    aside = read_lines(tmp_path / "metrics.superseded.jsonl")
    assert [(r["step"], r["loss"], r["superseded_by_resume_at"]) for r in aside] == [
        (11, 11.0, 10),
        (12, 12.0, 10),
    ]
    assert len(read_lines(tmp_path / "samples.jsonl")) == 20
    assert [r["prompt_id"] for r in read_lines(tmp_path / "eval.superseded.jsonl")] == [5]


def test_a_second_resume_keeps_what_the_first_moved(tmp_path):
    log = JsonlLog(tmp_path / "m.jsonl")
    for attempt in range(2):
        for step in (1, 2):
            log.append({"step": step, "attempt": attempt})
        log.rewind(0)
    aside = read_lines(tmp_path / "m.superseded.jsonl")
    assert [(r["attempt"], r["step"]) for r in aside] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert read_lines(tmp_path / "m.jsonl") == []


def test_a_line_cut_by_a_crash_spoils_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    log = JsonlLog(path)
    log.append({"step": 2, "loss": 0.5})
    assert [r["step"] for r in read_lines(path)] == [1, 2]
    assert log.rewind(2) == 1
    log.close()
    assert [strict_load(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    (aside,) = read_lines(tmp_path / "metrics.superseded.jsonl")
    assert aside["unreadable"] == '{"step": 2, "lo'


@pytest.mark.parametrize("tail", [bytes(4096), b'{"step": 2, "lo' + bytes(600), b'{"step": "2"}\n'])
def test_what_a_power_loss_left_at_the_end_spoils_no_other(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    log = JsonlLog(path)
    log.append({"step": 2, "loss": 0.5})
    assert [r["step"] for r in read_lines(path)] == [1, 2]
    assert log.rewind(2) == 1
    log.close()
    assert [strict_load(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_text_that_utf8_cannot_encode_is_written_as_its_escape(tmp_path):
    log = JsonlLog(tmp_path / "samples.jsonl")
    log.append({"step": 1, "completion": "half \ud800, whole \U0001f600", "rewards": {"\udc00": 1}})
    log.append({"step": 2})
    assert log.rewind(1) == 1
    log.close()
    (record,) = read_lines(tmp_path / "samples.jsonl")
    assert record["completion"] == "half \\ud800, whole \U0001f600"
    assert record["rewards"] == {"\\udc00": 1}


def test_a_line_cut_inside_a_character_spoils_no_other(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes('{"step": 1}\n{"step": 2, "text": "é'.encode()[:-1])
    log = JsonlLog(path)
    assert [record["step"] for record in read_lines(path)] == [1]
    assert log.rewind(1) == 1
    log.close()
    assert path.read_text() == '{"step": 1}\n'
