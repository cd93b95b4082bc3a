"""An export is the model that came in, plus training."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from learner.recorded_learner import RecordedLearner
from models.load_tokenizer import load_tokenizer
from services.process.phase_clock import PhaseClock
from services.wire.tls import RunAuthority
from tests.deadlines import HANG_S
from tests.learner.builders import functions_made_once
from tests.learner.tiny_learner import learner_spec
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
TRANSFORMERS4 = os.environ.get(
    "TANDEM_TRANSFORMERS4", str(ROOT / ".venv" / "transformers4" / "bin" / "python")
)
BF16 = np.dtype(ml_dtypes.bfloat16)
N20 = {
    "eos_token_id": [258, 257],
    "pad_token_id": 257,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
}
HELLO = [{"role": "user", "content": "hi 12"}]


@pytest.fixture(scope="module")
def authority():
    return RunAuthority.create("run")


@pytest.fixture(scope="module", autouse=True)
def same_functions():
    """No learner of this file trains: only the shapes of its parameters count, always the same."""
    with functions_made_once([]):
        yield


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def said():
    """What each export answered."""
    return []


@pytest.fixture
def export(model, authority, tmp_path, said):
    """Exports the model as a learner does that has not trained yet."""

    def run(model=model, **changes) -> pathlib.Path:
        spec = learner_spec(model, authority, tmp_path / "run", **changes)
        learner = RecordedLearner(spec, jax.devices()[:1], PhaseClock())
        folder = tmp_path / f"export-{model.name}"
        try:
            said.append(learner.export(str(folder)))
        finally:
            learner.close()
        return folder

    return run


def read(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def change(path: pathlib.Path, **values) -> dict:
    content = {k: v for k, v in {**read(path), **values}.items() if v is not ...}
    path.write_text(json.dumps(content))
    return content


def store_as(model: pathlib.Path, dtype_of) -> dict[str, np.ndarray]:
    """Stores every tensor of a model in the type that `dtype_of(name)` gives."""
    named = load_file(model / "model.safetensors")
    named = {name: array.astype(dtype_of(name)) for name, array in named.items()}
    save_file(named, model / "model.safetensors")
    return named


def assert_same(folder: pathlib.Path, named: dict[str, np.ndarray]) -> None:
    exported = load_file(folder / "model.safetensors")
    assert exported.keys() == named.keys()
    for name, array in named.items():
        assert exported[name].dtype == array.dtype, name
        assert exported[name].tobytes() == array.tobytes(), name


# --- settings


@pytest.mark.parametrize(
    "came, left",
    [
        (N20, {}),
        ({**N20, "eos_token_id": 258}, {}),
        (
            {"my_key": {"a": [1]}, "max_new_tokens": 99, "eos_token_id": [258], "pad_token_id": 3},
            {},
        ),
        # Every token that the run stopped at ends a completion of the policy.
        ({**N20, "eos_token_id": 7}, {"eos_token_id": [7, 258]}),
        ({**N20, "eos_token_id": None, "min_p": 0.1}, {"eos_token_id": [258]}),
    ],
)
def test_generation_settings_are_carried_over_N20(model, export, came, left):
    (model / "generation_config.json").write_text(json.dumps(came))
    assert read(export() / "generation_config.json") == {**came, **left}


def test_a_model_without_generation_settings_gets_its_special_tokens(model, export):
    (model / "generation_config.json").unlink()
    assert read(export() / "generation_config.json") == {"eos_token_id": [258], "pad_token_id": 256}


def test_config_json_is_carried_over_with_keys_that_nothing_here_reads(model, export):
    came = change(
        model / "config.json", initializer_range=0.3, rms_norm_eps=1e-6, note={"by": "us"}
    )
    exported = read(export() / "config.json")
    assert exported == came and list(exported) == list(came)


def test_a_rotary_embedding_that_only_transformers_5_spells_is_spelled_for_4_too(model, export):
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    change(model / "config.json", rope_parameters=rope, rope_theta=..., rope_scaling=None)
    config = read(export() / "config.json")
    assert config["rope_parameters"] == rope and config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


# --- types of the tensors


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, np.dtype(np.float16)])
def test_the_policy_leaves_in_the_type_that_it_came_in(model, export, said, dtype):
    named = store_as(model, lambda name: dtype)
    change(model / "config.json", dtype=..., torch_dtype=dtype.name)
    folder = export()
    assert_same(folder, named)
    assert read(folder / "config.json")["torch_dtype"] == dtype.name and said == [dtype.name]


def test_every_tensor_keeps_its_own_type(model, export, said):
    named = store_as(model, lambda name: np.float32 if "norm" in name else BF16)
    change(model / "config.json", dtype="bfloat16")
    folder = export()
    assert_same(folder, named)
    assert read(folder / "config.json")["dtype"] == "bfloat16"
    assert said == ["float32 and bfloat16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_key_chooses_the_type(model, export, said, dtype):
    named = store_as(model, lambda name: np.float16)
    change(model / "config.json", dtype="float16")
    folder = export(export_dtype=dtype)
    chosen = BF16 if dtype == "bfloat16" else np.dtype(np.float32)
    assert_same(folder, {name: a.astype(np.float32).astype(chosen) for name, a in named.items()})
    assert read(folder / "config.json")["dtype"] == dtype and said == [dtype]


# --- tokenizer


def test_the_files_of_the_tokenizer_are_copied_byte_for_byte(model, export):
    change(model / "tokenizer_config.json", model_max_length=77, my_own="kept")
    (model / "LICENSE").write_text("do what you like")
    folder = export()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        assert (folder / name).read_bytes() == (model / name).read_bytes(), name


def test_a_tokenizer_from_elsewhere_is_the_one_that_is_exported(model, export, tmp_path):
    other = write_tiny_model(tmp_path / "other")
    change(other / "tokenizer_config.json", model_max_length=78)
    assert read(export(tokenizer=str(other)) / "tokenizer_config.json")["model_max_length"] == 78


def test_a_template_of_the_run_replaces_the_one_that_came(model, export):
    change(model / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    template = CHAT_TEMPLATE.replace("<s>", "<s> ")
    folder = export(chat_template=template)
    ours = load_tokenizer(str(model), chat_template=template)
    assert load_tokenizer(str(folder)).encode_chat(HELLO) == ours.encode_chat(HELLO)
    assert read(folder / "tokenizer_config.json")["chat_template"] == template


def add_special_tokens(model: pathlib.Path) -> None:
    """Saves the tokenizer as transformers 5 does, with further special tokens."""
    backend = transformers.PreTrainedTokenizerFast.from_pretrained(model)
    backend.add_tokens(["<think>"], special_tokens=True)
    backend.add_special_tokens({"additional_special_tokens": ["<tool>", "</tool>"]})
    backend.save_pretrained(model)


def test_further_special_tokens_are_under_the_key_that_both_ages_read_N18(model, export):
    add_special_tokens(model)
    assert isinstance(read(model / "tokenizer_config.json")["extra_special_tokens"], list)
    config = read(export() / "tokenizer_config.json")
    assert config["additional_special_tokens"] == ["<tool>", "</tool>"]
    assert not isinstance(config.get("extra_special_tokens"), list)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def further_special_tokens(model: pathlib.Path) -> None:
    add_special_tokens(model)


def further_special_tokens_in_their_map(model: pathlib.Path) -> None:
    add_special_tokens(model)
    change(model / "tokenizer_config.json", extra_special_tokens=...)
    written = json.dumps({"extra_special_tokens": ["<tool>", "</tool>"]})
    (model / "special_tokens_map.json").write_text(written)


def special_tokens_with_names(model: pathlib.Path) -> None:
    add_special_tokens(model)
    named = {"think_token": "<think>"}
    change(model / "tokenizer_config.json", model_specific_special_tokens=named)


def float16(model: pathlib.Path) -> None:
    store_as(model, lambda name: np.float16)
    change(model / "config.json", dtype="float16")


def rotary_embedding_of_5(model: pathlib.Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    change(model / "config.json", rope_parameters=rope, rope_theta=..., rope_scaling=...)


KINDS = (
    further_special_tokens,
    further_special_tokens_in_their_map,
    special_tokens_with_names,
    float16,
    rotary_embedding_of_5,
)


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path(TRANSFORMERS4).is_file(),
    reason="needs a Python with transformers 4.57 and torch: `make .venv/.transformers4`, or its "
    "path in TANDEM_TRANSFORMERS4",
)
def test_an_export_is_the_same_in_transformers_4_and_5_N18(export, tmp_path):
    generation = N20 | {"eos_token_id": [258, 256]}
    models, folders = [], []
    for kind in KINDS:
        models.append(write_tiny_model(tmp_path / kind.__name__))
        change(models[-1] / "generation_config.json", **generation)
        kind(models[-1])
        folders.append(export(models[-1]))
    four, five = (read_with(python, folders) for python in (TRANSFORMERS4, sys.executable))
    for kind, model, in_4, in_5 in zip(KINDS, models, four, five, strict=True):
        assert (in_4.pop("version"), in_5.pop("version")) == (4, 5)
        assert in_4 == in_5, kind
        assert in_4["generation"] == generation
        ours = load_tokenizer(str(model)).encode_chat([{"role": "user", "content": "4 + 7?"}])
        assert in_4["chat_ids"] == ours
        assert in_4["dtype"] == ("torch.float16" if kind is float16 else "torch.float32")


def read_with(python: str, folders: list[pathlib.Path]) -> list[dict]:
    """What the transformers of that Python reads of each folder."""
    script = pathlib.Path(__file__).with_name("exported_model.py")
    ran = subprocess.run(
        [python, str(script), *map(str, folders)], capture_output=True, text=True, timeout=HANG_S
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


# --- the folder


@pytest.mark.parametrize("umask, mode", [(0o077, 0o700), (0o007, 0o770), (0o022, 0o755)])
def test_the_folder_has_the_mode_that_the_umask_leaves(export, umask, mode):
    before = os.umask(umask)
    try:
        folder = export()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == mode
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {mode & 0o666}
