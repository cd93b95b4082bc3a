import dataclasses
import logging

import pytest

from models.config import RopeConfig
from models.files import hf_config
from models.files.hf_config import from_hf, to_hf
from tests.models.tiny_models import HF_CONFIGS, LLAMA3, SIZES, YARN

LLAMA = HF_CONFIGS["llama"]
QWEN2 = HF_CONFIGS["qwen2"]
QWEN3 = HF_CONFIGS["qwen3"]


def test_published_qwen25_3b_config_is_read():
    config = from_hf(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 32768,
            "max_window_layers": 70,
            "model_type": "qwen2",
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
    )
    assert config.head_dim == 128
    assert config.qkv_bias and not config.o_bias and not config.qk_norm
    assert config.tie_word_embeddings
    assert config.rope == RopeConfig(theta=1e6)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_writing_and_reading_gives_the_same_config(name):
    config = from_hf(HF_CONFIGS[name])
    assert from_hf(to_hf(config)) == config


def test_qwen3_head_size_is_its_own_and_has_a_default():
    assert from_hf(QWEN3).head_dim == 16
    assert from_hf({**QWEN3, "head_dim": None}).head_dim == 128
    assert from_hf(QWEN3).qk_norm


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "type": "llama3",
                **{k: LLAMA3[k] for k in LLAMA3 if k != "rope_type"},
            },
        },
    ],
)
def test_old_and_new_spelling_of_rope_agree(old):
    new = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    assert from_hf({**LLAMA, **old}).rope == from_hf({**LLAMA, **new}).rope
    assert from_hf({**LLAMA, **old, **new}).rope == from_hf({**LLAMA, **new}).rope


def test_rope_theta_inside_rope_parameters_wins_over_the_default():
    assert from_hf({**LLAMA, "rope_parameters": {"rope_theta": 7e4}}).rope.theta == 7e4
    assert from_hf(LLAMA).rope.theta == 1e4


def test_original_length_defaults_to_the_models():
    scaling = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    rope = from_hf({**LLAMA, "rope_scaling": scaling}).rope
    assert rope.original_max_position_embeddings == SIZES["max_position_embeddings"]


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"model_type": "gemma3"}, "model_type='gemma3'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window=true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "unknown rope type 'dynamic'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "unknown rope type 'mrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "needs 'low_freq_factor'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must exceed"),
        ({"rope_scaling": {**YARN, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor='4'"),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "disagree"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": "96"}, "vocab_size='96'"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"hidden_size": 30}, "must be a multiple of num_attention_heads"),
        ({"head_dim": 7}, "even head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ],
)
def test_what_the_model_does_not_compute_is_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        from_hf({**LLAMA, **changed})


def test_sliding_window_is_refused_only_where_it_reaches_a_layer():
    windowed = {**QWEN2, "use_sliding_window": True, "sliding_window": 64}
    assert from_hf({**windowed, "max_window_layers": 2}).num_layers == 2
    assert from_hf({**windowed, "sliding_window": None, "max_window_layers": 0})
    with pytest.raises(ValueError, match=r"layers 1\.\.1"):
        from_hf({**windowed, "max_window_layers": 1})


def test_qwen2_without_biases_is_refused():
    with pytest.raises(ValueError, match="attention_bias=false"):
        from_hf({**QWEN2, "attention_bias": False})


def test_qwen_needs_its_key_value_heads_but_llama_has_one_for_each_query_head():
    without = lambda config: {k: v for k, v in config.items() if k != "num_key_value_heads"}
    assert from_hf(without(LLAMA)).num_kv_heads == 4
    with pytest.raises(ValueError, match="num_key_value_heads is missing"):
        from_hf(without(QWEN2))


def test_absent_tie_flag_is_false_and_reported_once(caplog):
    hf_config._report_untied_default.cache_clear()
    without = {k: v for k, v in QWEN2.items() if k != "tie_word_embeddings"}
    with caplog.at_level(logging.WARNING):
        assert [from_hf(without).tie_word_embeddings for _ in range(3)] == [False] * 3
    assert [record.getMessage()[:28] for record in caplog.records] == [
        "tie_word_embeddings is not s"
    ]


def test_switches_that_a_family_cannot_express_are_not_written():
    with pytest.raises(ValueError, match="cannot express"):
        to_hf(dataclasses.replace(from_hf(LLAMA), qk_norm=True))
