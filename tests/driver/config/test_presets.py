"""Presets: what they set, over the file and under `--set`."""

import pathlib
import re

import pytest

from driver.config.load_config import dump, load
from driver.config.presets import PRESETS, NoSuchPreset, explain
from learner.config import AlgorithmConfig

FILE = """
model: {path: here}
data: {train: {source: a.jsonl}, eval: {source: b.jsonl}}
run: {name: one, output_dir: out}
algorithm: {kl_coef: 0.5, entropy_coef: 0.25, advantage: group_centre}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_values_and_defaults_and_stands_in_the_configuration(name, path, tmp_path):
    config = load(path, preset_name=name)
    assert config.algorithm == AlgorithmConfig(**PRESETS[name].algorithm)
    assert config.algorithm.entropy_coef == 0.0, "the file's algorithm is replaced whole"
    written = tmp_path / "written.yaml"
    written.write_text(dump(config))
    assert load(str(written)) == config, "and is recorded"
    shown = explain(name, {"entropy_coef": 0.5, **PRESETS[name].algorithm})
    assert shown.startswith(f"preset {name}: ") and "arXiv:" in shown
    assert all(f"{key}=" in shown for key in PRESETS[name].algorithm)
    _, note, _ = shown.split("\n")
    assert note.startswith(
        "note: it replaces the file's section algorithm, so that entropy_coef=0.5"
    )


def test_set_comes_after_the_preset(path):
    config = load(path, ["algorithm.clip_high=0.3", "algorithm.entropy_coef=0.1"], "dapo")
    assert (config.algorithm.clip_high, config.algorithm.entropy_coef) == (0.3, 0.1)
    assert config.algorithm.zero_variance == "resample"


def test_a_value_that_does_not_fit_the_preset_names_both(path):
    with pytest.raises(ValueError, match=r"dual_clip=3.0 bounds .*--preset cispo"):
        load(path, ["algorithm.dual_clip=3"], "cispo")


def test_an_unknown_preset_lists_those_that_there_are(path):
    with pytest.raises(NoSuchPreset, match="--preset grop: there is none; there are grpo, dr_grpo"):
        load(path, preset_name="grop")
    assert explain(None, {}) == ""


def test_the_document_has_every_preset_as_it_is():
    text = (pathlib.Path(__file__).parents[3] / "docs/objectives.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (`\w+: .*?) \| .* \|$", text, re.MULTILINE))
    assert rows == {
        name: ", ".join(f"`{key}: {value}`" for key, value in preset.algorithm.items())
        for name, preset in PRESETS.items()
    }
