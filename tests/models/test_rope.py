import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig, RopeConfig
from models.files.hf_config import from_hf
from models.rope import inverse_frequencies, rotary, rotate


def model_config(head_dim=8, **rope) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=8,
        hidden_size=head_dim,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        rope=RopeConfig(**rope),
        max_position_embeddings=1024,
    )


def hf_config(case_input: dict) -> dict:
    return {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": case_input["head_dim"],
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "tie_word_embeddings": True,
        **case_input,
    }


def turn(x, position, config):
    x_BTNH = jnp.asarray(x, jnp.float32)[None, None, None]
    return np.asarray(rotate(x_BTNH, rotary(jnp.asarray([[position]]), config)))[0, 0, 0]


def test_default_frequencies_are_powers_of_theta():
    inverse, factor = inverse_frequencies(model_config(theta=10_000.0))
    np.testing.assert_allclose(inverse, [1, 0.1, 0.01, 0.001], rtol=1e-12)
    assert factor == 1.0


def test_linear_divides_every_frequency():
    inverse, _ = inverse_frequencies(model_config(kind="linear", factor=4.0))
    np.testing.assert_allclose(inverse, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-12)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    config = model_config(
        kind="llama3", factor=8.0, original_max_position_embeddings=int(2 * np.pi * 100)
    )
    inverse, _ = inverse_frequencies(config)
    turns = int(2 * np.pi * 100) * np.array([1, 0.1, 0.01, 0.001]) / (2 * np.pi)  # ~100, 10, 1, 0.1
    kept = (turns[2] - 1) / 3 if turns[2] > 1 else 0.0
    np.testing.assert_allclose(
        inverse, [1, 0.1, 0.01 * (kept + (1 - kept) / 8), 0.001 / 8], rtol=1e-12
    )


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_warms_attention():
    config = model_config(
        head_dim=16, kind="yarn", factor=4.0, original_max_position_embeddings=1024
    )
    inverse, factor = inverse_frequencies(config)
    plain, _ = inverse_frequencies(model_config(head_dim=16))
    # Turns in 1024 tokens: 163, 51.5, 16.3, .. 0.052; 32 are made by pair 1.41, 1 by pair 4.42:
    # the ramp runs from pair 1 to pair 5.
    ramp = np.array([0, 0, 0.25, 0.5, 0.75, 1, 1, 1])
    np.testing.assert_allclose(inverse, plain * ((1 - ramp) + ramp / 4), rtol=1e-12)
    assert factor == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 0.707, "mscale_all_dim": 1.0},
            (0.0707 * np.log(4) + 1) / (0.1 * np.log(4) + 1),
        ),
    ],
)
def test_yarn_attention_factor_follows_its_settings(given, expected):
    config = model_config(kind="yarn", factor=4.0, original_max_position_embeddings=256, **given)
    assert inverse_frequencies(config)[1] == pytest.approx(expected)


def test_yarn_factor_scales_cos_and_sin():
    config = model_config(
        kind="yarn", factor=4.0, original_max_position_embeddings=256, attention_factor=1.5
    )
    np.testing.assert_allclose(turn([1.0] * 8, 0, config), [1.5] * 8, rtol=1e-6)


def test_unknown_kind_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="unknown rope type 'mystery'"):
        inverse_frequencies(model_config(kind="mystery"))


def test_rotation_pairs_the_halves():
    # Pair 0 (elements 0 and 2) turns by 3 rad, pair 1 (elements 1 and 3) by 0.03 rad.
    c, s = np.cos([3, 0.03]), np.sin([3, 0.03])
    expected = [
        1 * c[0] - 3 * s[0],
        2 * c[1] - 4 * s[1],
        3 * c[0] + 1 * s[0],
        4 * c[1] + 2 * s[1],
    ]
    np.testing.assert_allclose(turn([1, 2, 3, 4], 3, model_config(head_dim=4)), expected, rtol=1e-6)


def test_scores_depend_on_the_distance_alone():
    config = model_config(head_dim=16)
    query, key = np.random.default_rng(0).normal(size=(2, 16))
    near = turn(query, 7, config) @ turn(key, 2, config)
    far = turn(query, 905, config) @ turn(key, 900, config)
    assert near == pytest.approx(far, rel=1e-3)


@pytest.mark.shared
@pytest.mark.parametrize("case_id", ["M04a", "M04b", "M04d"])
def test_frequencies_of_public_cases(cases, case_id):
    case = cases("model")[case_id]
    config = from_hf(hf_config(case["input"]))
    inverse, factor = inverse_frequencies(config)
    np.testing.assert_allclose(inverse, case["expected"]["inv_freq"], rtol=1e-6)
    assert factor == 1.0


@pytest.mark.shared
def test_unknown_kind_of_public_case_is_refused(cases):
    with pytest.raises(ValueError, match="unknown rope type 'mystery'"):
        from_hf(hf_config(cases("model")["M04c"]["input"]))


@pytest.mark.shared
@pytest.mark.parametrize("case_id", ["M05a", "M05b"])
def test_rotation_of_public_cases(cases, case_id):
    case = cases("model")[case_id]
    given = case["input"]
    turned = turn(
        given["x"], given["position"], model_config(head_dim=4, theta=given["rope_theta"])
    )
    np.testing.assert_allclose(turned, case["expected"]["half_split"], rtol=1e-6)
