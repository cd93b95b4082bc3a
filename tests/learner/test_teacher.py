"""A teacher is checked before a run without reading its weights, and loaded as that very one."""

import json
import shutil

import numpy as np
import pytest

from learner.config import AlgorithmConfig, DistillationConfig
from learner.teacher import check_teacher, load_teacher
from models.files.checkpoint import load_model, read_model_config
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of the model and one of a larger teacher."""
    folder = tmp_path_factory.mktemp("models")
    larger = dict(hidden_size=48, num_layers=3, vocab_size=272, tie_word_embeddings=False)
    return write_tiny_model(folder / "model"), write_tiny_model(folder / "large", seed=1, **larger)


def checked(model, teacher, *, sequence_tokens=64):
    return check_teacher(
        DistillationConfig(teacher=str(teacher)),
        model_path=str(model),
        tokenizer=None,
        model=read_model_config(str(model)),
        sequence_tokens=sequence_tokens,
    )


def refusal(*arguments, **named) -> str:
    with pytest.raises(ValueError) as refused:
        checked(*arguments, **named)
    return str(refused.value)


def algorithm(teacher) -> AlgorithmConfig:
    return AlgorithmConfig(distillation=DistillationConfig(teacher=str(teacher)))


@pytest.fixture
def copied(models, tmp_path):
    """A copy of the teacher whose tokenizer an editor has changed."""

    def make(edit=lambda tokenizer: None):
        folder = tmp_path / "teacher"
        shutil.copytree(models[1], folder)
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        edit(tokenizer)
        path.write_text(json.dumps(tokenizer))
        return folder

    return make


def test_a_larger_teacher_with_the_same_tokens_and_other_padding_may_teach(models):
    model, teacher = models
    found = checked(model, teacher)
    assert found.config.hidden_size == 48 and len(found.digest) == 64
    loaded = load_teacher(algorithm(teacher), read_model_config(str(model)), digest=found.digest)
    assert loaded.config.vocab_size == 264 and loaded.config.num_layers == 3
    whole = load_model(str(teacher)).params
    for name in ("embed_tokens", "lm_head"):
        np.testing.assert_array_equal(
            np.asarray(loaded.params[name]["weight"]), np.asarray(whole[name]["weight"])[:264]
        )


def test_no_distillation_is_no_teacher(models):
    assert load_teacher(AlgorithmConfig(), read_model_config(str(models[0]))) is None


def swap(tokenizer):
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def rename(tokenizer):
    for token in tokenizer["added_tokens"]:
        token["content"] = {"<s>": "<t>"}.get(token["content"], token["content"])


@pytest.mark.parametrize(
    "edit, parts",
    [
        (swap, ["2 of 259 tokens differ ('a' is ", "here and ", "there, 'b' is "]),
        (rename, ["1 of 259 tokens differ ('<s>' is 257 here and no token there)"]),
    ],
)
def test_another_vocabulary_is_refused_with_the_tokens_that_differ(models, copied, edit, parts):
    teacher = copied(edit)
    said = refusal(models[0], teacher)
    for part in [
        f"{teacher} has another vocabulary than {models[0]}",
        *parts,
        "the teacher's has 259",
        "choose a teacher with the model's tokenizer",
    ]:
        assert part in said, part


def test_a_teacher_without_a_tokenizer_is_refused_with_its_folder(models, copied):
    teacher = copied()
    (teacher / "tokenizer.json").unlink()
    said = refusal(models[0], teacher)
    assert f"{teacher} holds no tokenizer" in said and "put one there" in said


def test_sequences_that_the_teacher_was_not_trained_for_are_refused(models):
    said = refusal(*models, sequence_tokens=300)
    assert "max_position_embeddings=256" in said and "= 300: lower one of them" in said


def test_incomplete_weights_are_refused_before_anything_starts(models, copied):
    teacher = copied()
    (teacher / "model.safetensors").unlink()
    assert "has no weights" in refusal(models[0], teacher)
    assert "does not exist" in refusal(models[0], teacher / "nowhere")


def test_a_learner_with_other_weights_under_that_path_is_refused(models, copied):
    model, teacher = models
    digest = checked(model, teacher).digest
    assert checked(model, copied()).digest == digest, "a copy is the same teacher"
    with pytest.raises(ValueError, match="algorithm.distillation.teacher: .* other weights here"):
        load_teacher(algorithm(model), read_model_config(str(model)), digest=digest)
