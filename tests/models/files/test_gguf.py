import gguf
import numpy as np
import pytest

from models.config import RopeConfig
from models.files.checkpoint import check_model_files, load_model, read_model_config, to_named
from models.files.hf_config import from_hf
from models.rope import inverse_frequencies
from tests.models.tiny_models import HF_CONFIGS, LLAMA3, random_named

BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, *leaf, kind = name.split(".")
    return f"blk.{layer}.{BLOCK['.'.join(leaf)]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What converters do to llama's q and k, row by row: halves (i, i + H/2) become (2i, 2i+1)."""
    size = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def write_gguf(path, name: str, named, *, quantization=None, extra=(), tensors=(), drop=()):
    """A GGUF file as converters write it, by the gguf package's own writer."""
    hf = HF_CONFIGS[name]
    config = from_hf(hf)
    writer = gguf.GGUFWriter(path, config.model_type)
    settings = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
    }
    for key, value in settings.items():
        if key not in drop:
            writer.add_uint32(f"{config.model_type}.{key}", value)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    for key, value in dict(extra).items():
        writer.add_key_value(key, value, GGUF_TYPES[type(value)])
    for tensor, array in named.items():
        if config.model_type == "llama" and ".q_proj." in tensor:
            array = interleaved(array, config.num_heads)
        if config.model_type == "llama" and ".k_proj." in tensor:
            array = interleaved(array, config.num_kv_heads)
        if quantization is not None and array.ndim == 2:
            stored = gguf.quantize(array, quantization)
            writer.add_tensor(gguf_name(tensor), stored, raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(tensor), array)
    for tensor, array in dict(tensors).items():
        writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


GGUF_TYPES = {
    str: gguf.GGUFValueType.STRING,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
}


def named_of(name: str) -> dict[str, np.ndarray]:
    return random_named(from_hf(HF_CONFIGS[name]))


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "qwen2-tied", "qwen3"])
def test_a_gguf_file_gives_the_tensors_of_the_hf_folder(tmp_path, name):
    path = write_gguf(tmp_path / "m.gguf", name, named_of(name))
    check_model_files(path)
    model = load_model(path)
    assert (model.kind, model.folder) == ("gguf", None)
    assert model.config == read_model_config(path) == from_hf(HF_CONFIGS[name])
    actual = to_named(model.params, model.config)
    for tensor, expected in named_of(name).items():
        assert actual[tensor].dtype == model.stored_dtypes[tensor] == np.float32
        np.testing.assert_array_equal(actual[tensor], expected, err_msg=tensor)


@pytest.mark.parametrize(
    "quantization", [Q8_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.BF16]
)
def test_quantised_tensors_are_near_their_originals(tmp_path, quantization):
    path = write_gguf(tmp_path / "m.gguf", "llama", named_of("llama"), quantization=quantization)
    model = load_model(path)
    actual = to_named(model.params, model.config)
    for tensor, expected in named_of("llama").items():
        step = (expected.max() - expected.min()) / 15  # the coarsest: 16 levels, rounded down
        np.testing.assert_allclose(actual[tensor], expected, atol=step, err_msg=tensor)
    assert {dtype.name for dtype in model.stored_dtypes.values()} == {"bfloat16"}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path, factor):
    scaling = {**LLAMA3, "factor": factor, "original_max_position_embeddings": 8192}
    scaled = from_hf({**HF_CONFIGS["llama"], "rope_scaling": scaling})
    plain = from_hf(HF_CONFIGS["llama"])
    divisors = inverse_frequencies(plain)[0] / inverse_frequencies(scaled)[0]
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        named_of("llama"),
        tensors={"rope_freqs.weight": divisors.astype(np.float32)},
    )
    assert read_model_config(path) == scaled
    check_model_files(path)


def test_unknown_rope_divisors_are_refused(tmp_path):
    divisors = np.full(4, 3.0, np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", named_of("llama"), tensors={"rope_freqs.weight": divisors}
    )
    with pytest.raises(ValueError, match="rope_freqs.weight holds divisors up to 3"):
        load_model(path)


@pytest.mark.parametrize(
    "extra, expected",
    [
        ({"llama.rope.scaling.type": "none"}, RopeConfig()),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeConfig(kind="linear", factor=4.0),
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64),
        ),
    ],
)
def test_rope_scaling_is_read_from_metadata(tmp_path, extra, expected):
    path = write_gguf(tmp_path / "m.gguf", "llama", named_of("llama"), extra=extra)
    assert read_model_config(path).rope == expected


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"llama.rope.scaling.type": "longrope"}, "unknown rope type 'longrope'"),
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window=64"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor=0.5"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count=4"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(tmp_path, extra, message):
    path = write_gguf(tmp_path / "m.gguf", "llama", named_of("llama"), extra=extra)
    with pytest.raises(ValueError, match=rf"m\.gguf.*{message}"):
        read_model_config(path)


def test_an_unknown_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="general.architecture='mamba'"):
        load_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count"])
def test_missing_sizes_are_named(tmp_path, key):
    path = write_gguf(tmp_path / "m.gguf", "llama", named_of("llama"), drop=[key])
    with pytest.raises(ValueError, match=r"m\.gguf: .*(num_hidden_layers|embedding_length)"):
        load_model(path)


def test_missing_extra_and_wrong_tensors_are_named_with_the_file(tmp_path):
    whole = named_of("llama")
    norm = "model.layers.1.input_layernorm.weight"
    variants = {
        f"lacks {norm}": {name: whole[name] for name in whole if name != norm},
        f"{norm} \\[31\\]": {**whole, norm: whole[norm][:31]},
    }
    for number, (message, named) in enumerate(variants.items()):
        path = write_gguf(tmp_path / f"m{number}.gguf", "llama", named)
        for reader in (check_model_files, load_model):
            with pytest.raises(ValueError, match=rf"m{number}\.gguf.*{message}"):
                reader(path)
    path = write_gguf(
        tmp_path / "extra.gguf", "llama", whole, tensors={"blk.0.odd.weight": np.ones(2, "f")}
    )
    with pytest.raises(ValueError, match=r"extra\.gguf.*blk\.0\.odd\.weight"):
        load_model(path)


def test_a_file_cut_anywhere_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", named_of("llama"))
    content = (tmp_path / "m.gguf").read_bytes()
    header_end = len(content) - sum(array.nbytes for array in named_of("llama").values())
    for keep in [0, 10, 30, *range(40, header_end, 97), header_end + 5, len(content) - 1]:
        (tmp_path / "m.gguf").write_bytes(content[:keep])
        with pytest.raises(ValueError, match=r"m\.gguf is cut short"):
            check_model_files(path)


def test_another_file_is_not_taken_for_gguf(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"m\.gguf is not a GGUF file"):
        check_model_files(str(tmp_path / "m.gguf"))


def test_a_header_with_impossible_counts_ends_quickly(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16)
    with pytest.raises(ValueError, match=r"m\.gguf is cut short or damaged"):
        check_model_files(str(tmp_path / "m.gguf"))


def test_weights_that_are_not_finite_are_named_with_the_file(tmp_path):
    named = named_of("qwen2")
    named["model.norm.weight"][1] = np.nan
    path = write_gguf(tmp_path / "m.gguf", "qwen2", named)
    check_model_files(path)  # reads headers only
    with pytest.raises(ValueError, match=r"m\.gguf: model\.norm\.weight holds nan at \[1\]"):
        load_model(path)
