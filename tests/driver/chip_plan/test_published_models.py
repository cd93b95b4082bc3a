"""Sizes of a run's model for a plan, with and without its files."""

import json

import pytest

from driver.chip_plan.published_models import PUBLISHED, QWEN25_7B, model_of, teacher_of
from driver.config.load_config import ConfigError
from models.files.checkpoint import expected_shapes

# As the model cards have them, in billions, without the embedding's second use.
PARAMETERS = {"0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616}


@pytest.mark.parametrize("size, billions", PARAMETERS.items())
def test_a_published_model_has_the_parameters_that_its_card_states(size, billions):
    model = PUBLISHED[f"Qwen/Qwen2.5-{size}-Instruct"]
    count = 0
    for shape in expected_shapes(model).values():
        count += shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert count / 1e9 == pytest.approx(billions, abs=5e-4)


def test_a_known_name_needs_no_files():
    assert model_of("Qwen/Qwen2.5-7B-Instruct") == QWEN25_7B
    assert model_of("Qwen/Qwen2.5-7B-Instruct", layers=2).num_layers == 2


def test_a_config_file_stands_for_the_model(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "vocab_size": 128,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
            }
        )
    )
    assert model_of("Qwen/Qwen2.5-7B-Instruct", str(file)).hidden_size == 64


def test_a_folder_of_this_machine_is_read():
    assert model_of("deploy/demo/model").num_layers == 3


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "is not JSON"),
        ("[1, 2]", "must hold a JSON object, got list"),
        ("{}", "model_type"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_what_to_give(tmp_path, text, said):
    file = tmp_path / "config.json"
    file.write_text(text)
    refused = rf"--model-config .*config.json: .*{said}.* alone: give it with"
    with pytest.raises(ConfigError, match=refused):
        model_of("deploy/demo/model", str(file))


def test_a_teacher_that_is_not_there_is_refused_under_its_own_key():
    assert teacher_of("Qwen/Qwen2.5-7B-Instruct") == QWEN25_7B
    with pytest.raises(ConfigError) as refusal:
        teacher_of("no/such/folder")
    assert str(refusal.value).startswith("algorithm.distillation.teacher: ")
    assert "no/such/folder" in str(refusal.value) and "model.path" not in str(refusal.value)
