"""Adapters in PEFT's files: its logits and ours in float32, both ways round; what is refused."""

import json

import jax
import numpy as np
import pytest

from models.adapter import adapter_shape, join
from models.files.checkpoint import load_model, save_model
from models.files.hf_config import from_hf
from models.files.peft_folder import load_peft, read_peft_shape, write_peft
from tests.models.test_adapter import LINEAR, random_adapter, scaled
from tests.models.tiny_models import HF_CONFIGS, random_named

CONFIG = from_hf(HF_CONFIGS["qwen2"])


def write_adapter(folder, targets=("q_proj", "down_proj"), config=CONFIG):
    shape = adapter_shape(targets, rank=4, alpha=6.0, config=config)
    adapter = random_adapter(shape, config)
    write_peft(folder, adapter, shape, base_model="base")
    return shape, adapter


def change_settings(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_adapter_is_read_as_it_was_written(tmp_path):
    shape, adapter = write_adapter(tmp_path / "a")
    assert read_peft_shape(tmp_path / "a", CONFIG) == shape
    read = load_peft(tmp_path / "a", CONFIG)
    assert read.shape == shape
    jax.tree.map(np.testing.assert_array_equal, read.params, adapter)


def test_an_earlier_adapter_is_replaced_and_nothing_else_is(tmp_path):
    write_adapter(tmp_path / "a")
    shape, adapter = write_adapter(tmp_path / "a", targets=("v_proj",))
    assert load_peft(tmp_path / "a", CONFIG).shape == shape
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is no earlier export"):
        write_peft(tmp_path / "b", adapter, shape, base_model="base")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is more than plain LoRA, which has 'LORA'"),
        ({"use_dora": True}, "use_dora=True is more than plain LoRA"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern="),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"layers_to_transform": [0]}, "layers_to_transform="),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"r": 0}, "r=0 and lora_alpha=6.0 must be numbers above 0"),
        ({"lora_alpha": None}, "lora_alpha=None must be"),
        ({"r": 8}, r"wrong shape: .* \[4, 32\] instead of \[8, 32\]"),
        ({"r": 64}, "rank=64 is larger than"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_its_name(tmp_path, changes, message):
    write_adapter(tmp_path / "a")
    change_settings(tmp_path / "a", **changes)
    with pytest.raises(ValueError, match=message):
        read_peft_shape(tmp_path / "a", CONFIG)


def test_a_folder_of_another_model_or_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        load_peft(tmp_path / "none", CONFIG)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"adapter_config.json"):
        load_peft(tmp_path / "empty", CONFIG)
    write_adapter(tmp_path / "a")
    other = from_hf({**HF_CONFIGS["qwen2"], "num_hidden_layers": 3})
    with pytest.raises(ValueError, match="lack model.layers.2.self_attn.q_proj.lora_A.weight"):
        load_peft(tmp_path / "a", other)
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no adapter_model.safetensors"):
        load_peft(tmp_path / "a", CONFIG)


def test_a_number_that_is_not_finite_is_refused(tmp_path):
    shape = adapter_shape(("q_proj",), rank=4, alpha=6.0, config=CONFIG)
    adapter = random_adapter(shape, CONFIG)
    adapter["layers"]["self_attn"]["q_proj"]["lora_B"][1, 0, 0] = np.nan
    write_peft(tmp_path / "a", adapter, shape, base_model="base")
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.lora_B.weight .*not finite"):
        load_peft(tmp_path / "a", CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "llama-biases"])
def test_peft_computes_the_same_with_our_adapter(tmp_path, name):
    peft, parity = peft_and_parity()
    config = from_hf(HF_CONFIGS[name])
    save_model(tmp_path / "m", config, random_named(config))
    shape, adapter = write_adapter(tmp_path / "a", LINEAR, config)
    theirs = peft.PeftModel.from_pretrained(parity.their_model(tmp_path / "m"), tmp_path / "a")
    base = load_model(str(tmp_path / "m"))
    ids_BT = parity.random_ids(config, 24)
    alone = parity.our_logits(base, ids_BT)
    ours = parity.compiled_logits(join(base.params, scaled(adapter, shape)), config, ids_BT)
    assert np.abs(ours - alone).max() > 0.1
    np.testing.assert_allclose(ours, parity.their_logits(theirs, ids_BT), atol=1e-4, rtol=0)
    merged = parity.their_logits(theirs.merge_and_unload(), ids_BT)
    np.testing.assert_allclose(ours, merged, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_we_compute_the_same_with_an_adapter_of_peft_s(tmp_path, targets):
    peft, parity = peft_and_parity()
    config = CONFIG
    save_model(tmp_path / "m", config, random_named(config))
    parity.torch.manual_seed(0)
    theirs = peft.get_peft_model(
        parity.their_model(tmp_path / "m"),
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=10,
            lora_dropout=0.1,
            target_modules=targets,
            init_lora_weights=False,
        ),
    ).eval()
    theirs.save_pretrained(tmp_path / "a")
    read = load_peft(tmp_path / "a", config)
    assert read.shape.scale == 2.5 and len(read.shape.modules) == (
        2 if type(targets) is list else 7
    )
    base = load_model(str(tmp_path / "m"))
    ids_BT = parity.random_ids(config, 24)
    ours = parity.compiled_logits(
        join(base.params, scaled(read.params, read.shape)), config, ids_BT
    )
    assert np.abs(ours - parity.our_logits(base, ids_BT)).max() > 0.01
    np.testing.assert_allclose(ours, parity.their_logits(theirs, ids_BT), atol=1e-4, rtol=0)


def peft_and_parity():
    """The library, and the comparison of plain models with transformers, which needs torch."""
    peft = pytest.importorskip("peft", reason="needs the test extra: peft")
    from tests.models import test_parity

    return peft, test_parity
