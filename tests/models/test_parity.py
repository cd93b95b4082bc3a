"""Our logits beside those of transformers, in float32, both ways round through a folder."""

import copy
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from models.files.checkpoint import load_model, save_model, to_named
from models.files.hf_config import from_hf
from models.load_tokenizer import load_tokenizer
from models.transformer import forward, head_weight, logits, packed_attend
from tests.models.tiny_models import HF_CONFIGS, SIZES, YARN, random_named

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="needs the test extra: torch")

SMOLLM2 = pathlib.Path(__file__).parents[2] / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CONFIGS = {
    **HF_CONFIGS,
    "qwen3-yarn-deepseek": {
        **HF_CONFIGS["qwen3"],
        "rope_scaling": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.0, "truncate": False},
    },
    "llama-wide-heads": {**HF_CONFIGS["llama"], "head_dim": 24},
    "qwen2-new-rope-key": {
        "model_type": "qwen2",
        **SIZES,
        "rope_parameters": {"rope_theta": 3e4, **YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    },
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.partial(jax.jit, static_argnums=1)
def compiled_logits(params, config, ids_BT):
    position_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    attend = packed_attend(jnp.ones_like(ids_BT), operand_dtype=jnp.float32)
    hidden, _ = forward(params, config, ids_BT, position_BT, attend, compute_dtype=jnp.float32)
    return logits(hidden, head_weight(params))


def our_logits(model, ids_BT) -> np.ndarray:
    return np.asarray(compiled_logits(model.params, model.config, jnp.asarray(ids_BT, jnp.int32)))


def their_model(folder):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def their_logits(model, ids_BT):
    with torch.no_grad():
        return model(torch.tensor(np.asarray(ids_BT, np.int64))).logits.numpy()


def random_ids(config, T=150):
    """Longer than the 64 positions that the scaled configs were trained for."""
    return np.random.default_rng(1).integers(0, config.vocab_size, (2, T))


@pytest.mark.parametrize("name", CONFIGS)
def test_our_export_gives_the_same_logits_in_transformers(tmp_path, name):
    config = from_hf(CONFIGS[name])
    save_model(tmp_path / "m", config, random_named(config))
    ids_BT = random_ids(config)
    theirs = their_logits(their_model(tmp_path / "m"), ids_BT)
    assert np.abs(theirs).max() > 1  # the comparison below is about something
    np.testing.assert_allclose(
        our_logits(load_model(str(tmp_path / "m")), ids_BT), theirs, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_gives_the_same_logits_here(tmp_path, name):
    torch.manual_seed(0)
    # A copy, since transformers writes into the dict of the scaling, which other tests read.
    values = copy.deepcopy({k: v for k, v in CONFIGS[name].items() if k != "model_type"})
    # Wider than its default, so that attention is far from uniform.
    hf_config = transformers.AutoConfig.for_model(
        CONFIGS[name]["model_type"], **values, initializer_range=0.3
    )
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    theirs.save_pretrained(tmp_path / "m")
    model = load_model(str(tmp_path / "m"))
    ids_BT = random_ids(model.config)
    np.testing.assert_allclose(
        our_logits(model, ids_BT), their_logits(theirs, ids_BT), atol=1e-4, rtol=0
    )


def test_bfloat16_export_is_read_bit_for_bit_by_transformers(tmp_path):
    config = from_hf(HF_CONFIGS["qwen2"])
    named = {name: a.astype(jnp.bfloat16) for name, a in random_named(config).items()}
    save_model(tmp_path / "m", config, named)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert model.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        bits = tensor.view(torch.int16).numpy()
        np.testing.assert_array_equal(bits, named[name].view(np.int16), err_msg=name)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="needs `make smollm2`")
def test_real_smollm2_agrees_with_transformers_through_our_export(tmp_path):
    model, tokenizer = load_model(str(SMOLLM2)), load_tokenizer(str(SMOLLM2))
    save_model(tmp_path / "m", model.config, to_named(model.params, model.config), tokenizer)
    question = "What is 123 + 45? Think it over, then write #### and the number."
    ids_BT = np.array([tokenizer.encode_chat([{"role": "user", "content": question}])])
    theirs = their_logits(their_model(tmp_path / "m"), ids_BT)
    assert_close_logits(our_logits(model, ids_BT), theirs, ids_BT)
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2]


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="needs `make smollm2`")
def test_real_smollm2_agrees_with_the_gguf_reader_of_transformers():
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=torch.float32
    )
    ids_BT = np.random.default_rng(0).integers(0, 49152, (1, 24))
    ours = our_logits(load_model(str(SMOLLM2)), ids_BT)
    assert_close_logits(ours, their_logits(theirs.eval(), ids_BT), ids_BT)


def assert_close_logits(ours, theirs, ids_BT):
    """Logprobs of the text within 1e-4, and so are all but a few of its logits.

    These logits reach 33, and transformers in float32 is itself 1e-4 away from float64.
    """
    logprob = lambda x: np.take_along_axis(
        x[:, :-1] - np.logaddexp.reduce(x[:, :-1].astype(np.float64), -1, keepdims=True),
        ids_BT[:, 1:, None],
        -1,
    )
    np.testing.assert_allclose(logprob(ours), logprob(theirs), atol=1e-4, rtol=0)
    difference = np.abs(ours - theirs)
    assert (difference > 1e-4).mean() < 3e-3 and difference.max() < 3e-4
