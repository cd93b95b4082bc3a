"""`learner.lora` before any device is touched: what it plans, and what it refuses."""

import json
import pathlib

import pytest

from driver.config.load_config import ConfigError, load, load_as
from driver.config.prepare import prepare
from driver.config.resume_identity import NotResumable, check_identity, identity_of, write_identity
from driver.sft.sft_config import SftConfig
from models.adapter import adapter_shape, init_adapter
from models.files.checkpoint import load_model
from models.files.fingerprint import fingerprint
from models.files.peft_folder import write_peft

DEMO = pathlib.Path(__file__).parents[3] / "deploy/demo/model"
YAML = """
model: {{path: {model}}}
data: {{train: {{source: {folder}/train.jsonl}}}}
rollout: {{max_prompt_tokens: 64, max_completion_tokens: 16, decode: {{slots: 8}}}}
learner: {{compute_dtype: float32}}
eval: {{at_start: false, at_end: false}}
"""


@pytest.fixture
def config_of(tmp_path):
    def make(*overrides):
        record = {"question": "1 + 2 ?", "answer": "3"}
        (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
        file = tmp_path / "run.yaml"
        file.write_text(YAML.format(model=DEMO, folder=tmp_path))
        return load(str(file), overrides)

    return make


def test_the_plan_says_what_trains_and_what_the_learner_holds(config_of):
    prepared = prepare(config_of("learner.lora={rank: 8, alpha: 12, targets: [q_proj, mlp.*]}"))
    config = load_model(str(DEMO)).config
    D, F, L = config.hidden_size, config.intermediate_size, config.num_layers
    Q = config.num_heads * config.head_dim
    trained = L * 8 * ((D + Q) + 3 * (D + F))
    assert (
        f"lora: {trained:,} parameters train, " in prepared.text
        and "rank 8, alpha 12, at q_proj, gate_proj, up_proj, down_proj of every layer"
        in prepared.text
    )
    assert prepared.base_digest == fingerprint(str(DEMO))
    plain = prepare(config_of())
    assert "lora:" not in plain.text and plain.base_digest is None

    def state(text):
        (line,) = [line for line in text.splitlines() if line.startswith("learner: mesh")]
        return line

    # float32: the model once, and four of the adapter; four of the model without one.
    parameters = int(plain.text.split(" parameters, vocabulary")[0].split()[-1].replace(",", ""))
    assert f"state {4 * (parameters + 4 * trained) / 1e6:.2f} MB" in state(prepared.text)
    assert f"state {16 * parameters / 1e6:.2f} MB" in state(plain.text)


@pytest.mark.parametrize(
    "override, message",
    [
        ("learner.lora.rank=0", "learner.lora.rank: 0 must be at least 1"),
        ("learner.lora.alpha=8", "learner.lora.rank: is required"),
        ("learner.lora={rank: 8, alpha: 0}", "learner.lora.alpha: 0 must be greater than 0"),
        ("learner.lora={rank: 8, dropout: 0.1}", "learner.lora.dropout: unknown key"),
        ("learner.lora={rank: 8, targets: []}", "learner.lora.targets"),
        (
            "learner.lora={rank: 8, targets: [c_attn]}",
            "learner.lora: targets: 'c_attn' matches no linear projection of the model; they are "
            ".*self_attn.q_proj",
        ),
        (
            "learner.lora={rank: 8, targets: [model.layers.0.*]}",
            "learner.lora: targets match self_attn.q_proj in layer 0 but not in layer 1",
        ),
        (
            "learner.lora.rank=65",
            r"learner.lora: rank=65 is larger than self_attn.k_proj allows, which is \[64, 192\]: "
            "set it to 64 or less",
        ),
        (
            f"algorithm.distillation.teacher={DEMO}",
            "learner.lora with algorithm.distillation.form=full: .* set form to sampled",
        ),
    ],
)
def test_what_cannot_work_is_one_clear_error(config_of, override, message):
    more = ["learner.lora.rank=8"] if override.startswith("algorithm") else []
    with pytest.raises(ConfigError, match=message):
        prepare(config_of(*more, override))


def test_an_adapter_to_start_from_is_checked_and_known_again(config_of, tmp_path):
    model = load_model(str(DEMO)).config

    def written(seed):
        shape = adapter_shape(("q_proj",), rank=4, alpha=8.0, config=model)
        write_peft(tmp_path / "a", init_adapter(shape, model, seed), shape, base_model=str(DEMO))

    written(0)
    settings = f"rank: 4, alpha: 8, targets: [q_proj], init_from: {tmp_path / 'a'}"
    first = prepare(config_of(f"learner.lora={{{settings}}}")).base_digest
    written(1)
    assert prepare(config_of(f"learner.lora={{{settings}}}")).base_digest != first
    assert first.startswith(fingerprint(str(DEMO)))
    for change, message in (
        (settings.replace("alpha: 8", "alpha: 16"), "alpha 8, at .* asks for rank 4, alpha 16"),
        (settings.replace("/a", "/none"), "learner.lora: .*none is no folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(config_of(f"learner.lora={{{change}}}"))


def test_a_teacher_that_is_an_advantage_goes_with_an_adapter(config_of):
    distillation = f"algorithm.distillation={{teacher: {DEMO}, form: sampled}}"
    assert "lora:" in prepare(config_of("learner.lora.rank=8", distillation)).text


def test_supervised_training_refuses_an_adapter(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text(f"model: {{path: {DEMO}}}\ndata: {{train: {{source: x.jsonl}}}}\n")
    with pytest.raises(ConfigError, match=r"learner.lora trains an adapter by reinforcement"):
        load_as(SftConfig, str(file), ["learner.lora.rank=4"])


@pytest.mark.parametrize(
    "now, digest, message",
    [
        (["learner.lora={rank: 8, alpha: 8}"], "abc", "another adapter .* put learner.lora back"),
        ([], None, "another adapter"),
        (["learner.lora.rank=8"], "abd", "another base .abc then, abd now.: put the files of"),
    ],
)
def test_a_resume_keeps_adapter_and_base(config_of, tmp_path, now, digest, message):
    prepared = prepare(config_of())
    facts = (prepared.model, prepared.data, prepared.order, None)
    before = identity_of(config_of("learner.lora.rank=8"), *facts, "abc")
    write_identity(tmp_path, before, prepared.moment)
    assert check_identity(tmp_path, before, steps=7) == []
    with pytest.raises(NotResumable, match=message):
        check_identity(tmp_path, identity_of(config_of(*now), *facts, digest), steps=7)


def test_a_run_of_a_program_without_adapters_goes_on_without_one(config_of, tmp_path):
    prepared = prepare(config_of())
    now = identity_of(config_of(), prepared.model, prepared.data, prepared.order)
    before = {name: value for name, value in now.items() if name not in ("adapter", "base")}
    write_identity(tmp_path, before, prepared.moment)
    assert check_identity(tmp_path, now, steps=7) == []
