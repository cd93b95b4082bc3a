import functools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.files import hf_export
from models.files.checkpoint import (
    check_model_files,
    expected_shapes,
    from_named,
    load_model,
    read_model_config,
    save_model,
    to_named,
)
from models.files.hf_config import from_hf
from models.transformer import abstract_params, forward, head_weight, logits, packed_attend
from tests.models.tiny_models import HF_CONFIGS, random_named, split, write_folder

BF16 = np.dtype(ml_dtypes.bfloat16)
SINGLE = "model.safetensors"


def named_of(name: str, dtype=np.float32) -> dict[str, np.ndarray]:
    return random_named(from_hf(HF_CONFIGS[name]), dtype)


def single(folder, name: str, named, **changed):
    return write_folder(folder, {**HF_CONFIGS[name], **changed}, {SINGLE: named})


def assert_same(actual, expected):
    assert set(actual) == set(expected)
    for name in expected:
        assert actual[name].dtype == expected[name].dtype, name
        assert np.asarray(actual[name]).tobytes() == np.asarray(expected[name]).tobytes(), name


@functools.partial(jax.jit, static_argnums=1)
def compiled_logits(params, config, ids_BT):
    position_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    attend = packed_attend(jnp.ones_like(ids_BT), operand_dtype=jnp.float32)
    hidden, _ = forward(params, config, ids_BT, position_BT, attend, compute_dtype=jnp.float32)
    return logits(hidden, head_weight(params))


def run(params, config) -> np.ndarray:
    return np.asarray(compiled_logits(params, config, jnp.asarray([[3, 1, 4, 1, 5]])))


# --- names and trees


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_expected_shapes_are_those_of_the_model(name):
    config = from_hf(HF_CONFIGS[name])
    stacked = jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]
    from_model = {}
    for path, leaf in stacked:
        keys = [part.key for part in path]
        if keys[0] == "layers":
            for i in range(config.num_layers):
                from_model[f"model.layers.{i}.{'.'.join(keys[1:])}"] = leaf.shape[1:]
        else:
            prefix = "" if keys[0] == "lm_head" else "model."
            from_model[prefix + ".".join(keys)] = leaf.shape
    assert from_model == expected_shapes(config)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2-tied"])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_naming_and_unnaming_are_inverse(name, stacked, place):
    named = {key: place(value) for key, value in named_of(name).items()}
    config = from_hf(HF_CONFIGS[name])
    params = from_named(named, config, stacked=stacked)
    assert isinstance(params["layers"], list) != stacked
    assert_same(to_named(params, config), named)


def test_stacked_and_listed_layers_compute_the_same():
    named, config = named_of("qwen2"), from_hf(HF_CONFIGS["qwen2"])
    np.testing.assert_allclose(
        run(from_named(named, config, stacked=True), config),
        run(from_named(named, config, stacked=False), config),
        atol=1e-5,
    )


def test_layers_of_different_types_are_stacked_as_float32():
    named, config = named_of("llama"), from_hf(HF_CONFIGS["llama"])
    mixed = "model.layers.1.mlp.up_proj.weight"
    named[mixed] = named[mixed].astype(BF16)
    up = from_named(named, config, stacked=True)["layers"]["mlp"]["up_proj"]["weight"]
    assert up.dtype == np.float32
    np.testing.assert_array_equal(up[1], named[mixed].astype(np.float32))


# --- loading


@pytest.mark.parametrize("name", HF_CONFIGS)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16])
def test_a_folder_is_loaded_bit_for_bit(tmp_path, name, parts, dtype):
    named = named_of(name, dtype)
    shards = {SINGLE: named} if parts == 1 else split(named, parts)
    folder = write_folder(tmp_path / "m", HF_CONFIGS[name], shards)
    check_model_files(str(folder))
    model = load_model(str(folder))
    assert model.kind == "folder" and model.folder == folder
    assert model.config == read_model_config(str(folder)) == from_hf(HF_CONFIGS[name])
    assert_same(to_named(model.params, model.config), named)


def test_float16_becomes_float32(tmp_path):
    named = named_of("qwen3", np.float16)
    model = load_model(str(single(tmp_path / "m", "qwen3", named)))
    wide = {name: value.astype(np.float32) for name, value in named.items()}
    assert_same(to_named(model.params, model.config), wide)


def test_stored_rotary_frequencies_of_old_exports_are_passed_over(tmp_path):
    named = named_of("llama")
    named["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert load_model(str(single(tmp_path / "m", "llama", named)))


@pytest.mark.parametrize("suffix", ["q_proj.bias", "k_proj.bias", "v_proj.bias"])
def test_every_loaded_bias_changes_the_logits(tmp_path, suffix):
    named = named_of("qwen2")
    before = load_model(str(single(tmp_path / "a", "qwen2", named)))
    name = f"model.layers.1.self_attn.{suffix}"
    # A constant added to every key shifts all scores of a row alike, so the change must vary.
    shift = np.linspace(-2, 2, named[name].size, dtype=np.float32)
    after = load_model(str(single(tmp_path / "b", "qwen2", {**named, name: named[name] + shift})))
    difference = run(before.params, before.config) - run(after.params, after.config)
    assert np.abs(difference).max() > 1e-3


# --- what is missing, extra, cut or of the wrong shape


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_each_missing_tensor_is_named_with_its_file(tmp_path, name):
    whole = named_of(name)
    for number, missing in enumerate(whole):
        rest = {key: value for key, value in whole.items() if key != missing}
        folder = single(tmp_path / f"m{number}", name, rest)
        for reader in (check_model_files, load_model):
            with pytest.raises(ValueError, match=rf"{SINGLE} lacks {re.escape(missing)}"):
                reader(str(folder))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_each_wrong_shape_is_named_with_its_file(tmp_path, name):
    whole = named_of(name)
    for number, wrong in enumerate(whole):
        shape = whole[wrong].shape[::-1] if whole[wrong].ndim == 2 else (1,)
        if shape == whole[wrong].shape:
            shape = (1, 1)
        bad = {**whole, wrong: np.zeros(shape, np.float32)}
        folder = write_folder(tmp_path / f"m{number}", HF_CONFIGS[name], split(bad, 2))
        with pytest.raises(ValueError, match=rf"{re.escape(wrong)} .*instead of.*-of-00002"):
            check_model_files(str(folder))


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "score.weight",
    ],
)
def test_tensors_that_nothing_uses_are_refused(tmp_path, extra):
    folder = single(tmp_path / "m", "llama", {**named_of("llama"), extra: np.ones(4, np.float32)})
    for reader in (check_model_files, load_model):
        with pytest.raises(ValueError, match=rf"{re.escape(extra)} \(in {SINGLE}\)"):
            reader(str(folder))


def test_the_check_reads_no_tensor_data(tmp_path, monkeypatch):
    folder = single(tmp_path / "m", "llama", named_of("llama"))
    monkeypatch.setattr(np, "memmap", None)  # what maps tensor data
    check_model_files(str(folder))


@pytest.fixture
def sharded(tmp_path):
    return write_folder(tmp_path / "m", HF_CONFIGS["llama"], split(named_of("llama"), 3))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_absent_shard_is_named(sharded, number):
    shard = sharded / f"model-0000{number}-of-00003.safetensors"
    shard.unlink()
    with pytest.raises(ValueError, match=f"lacks {shard.name}"):
        load_model(str(sharded))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_cut_shard_is_named(sharded, number):
    shard = sharded / f"model-0000{number}-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"{shard.name} is cut short"):
        load_model(str(sharded))


def test_a_stray_file_beside_an_index_is_ignored_and_reported(sharded, caplog):
    stray = random_named(from_hf(HF_CONFIGS["llama"]), seed=9)
    write_folder(sharded, HF_CONFIGS["llama"], {SINGLE: stray})
    model = load_model(str(sharded))
    assert_same(to_named(model.params, model.config), named_of("llama"))
    assert SINGLE in caplog.text


def test_index_and_headers_must_agree(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"-of-00003\.safetensors adds model\.norm\.weight"):
        load_model(str(sharded))


def test_an_index_cannot_point_outside_its_folder(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../x.safetensors"}}))
    with pytest.raises(ValueError, match="outside its folder"):
        load_model(str(sharded))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {}}'])
def test_a_damaged_index_is_named(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json"):
        load_model(str(sharded))


@pytest.mark.parametrize(
    "files, message",
    [
        ([], r"expected model\.safetensors"),
        (["pytorch_model.bin"], "pickle"),
        (["model-00001-of-00002.safetensors"], "without model.safetensors.index.json"),
    ],
)
def test_a_folder_without_weights_says_what_is_expected(tmp_path, files, message):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIGS["llama"]))
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ValueError, match=message) as refusal:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(refusal.value)


def test_a_folder_without_config_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"no config\.json: it holds notes\.txt"):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize("path", ["no/such/folder/here", "absent.gguf", "name-without-owner"])
def test_a_path_that_is_nothing_is_refused_without_the_network(path):
    with pytest.raises(ValueError, match=f"{path!r} does not exist"):
        load_model(path)


def test_a_hub_id_without_network_or_cache_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="hub cannot be reached"):
        load_model("owner/no-such-model")


# --- tied and untied heads


def test_tied_flag_wins_over_a_differing_head_and_says_so(tmp_path, caplog):
    named = named_of("qwen2-tied")
    named["lm_head.weight"] = named["model.embed_tokens.weight"] + 1
    model = load_model(str(single(tmp_path / "m", "qwen2-tied", named)))
    assert "lm_head" not in model.params
    assert "the config wins" in caplog.text and "lm_head.weight" in caplog.text


def test_a_stored_head_equal_to_the_embedding_is_dropped_silently(tmp_path, caplog):
    named = named_of("qwen2-tied")
    named["lm_head.weight"] = named["model.embed_tokens.weight"].copy()
    model = load_model(str(single(tmp_path / "m", "qwen2-tied", named)))
    assert "lm_head" not in model.params and not caplog.records


def test_a_missing_head_is_an_error_that_says_why(tmp_path):
    named = named_of("qwen2")
    del named["lm_head.weight"]
    with pytest.raises(ValueError, match="lm_head.weight; tie_word_embeddings is false"):
        load_model(str(single(tmp_path / "m", "qwen2", named)))


# --- saving


@pytest.mark.parametrize("name", HF_CONFIGS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16])
def test_saved_and_reloaded_is_bit_equal(tmp_path, name, dtype):
    named, config = named_of(name, dtype), from_hf(HF_CONFIGS[name])
    save_model(tmp_path / "out", config, named)
    model = load_model(str(tmp_path / "out"))
    assert model.config == config
    assert_same(to_named(model.params, config), named)


def test_a_large_model_is_sharded_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_export, "MAX_SHARD_BYTES", 30_000)
    named, config = named_of("qwen2"), from_hf(HF_CONFIGS["qwen2"])
    save_model(tmp_path / "out", config, named)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 30_000 + 4096 for shard in shards)
    assert_same(to_named(load_model(str(tmp_path / "out")).params, config), named)


def test_jax_arrays_are_saved_as_they_are(tmp_path):
    named, config = named_of("llama", BF16), from_hf(HF_CONFIGS["llama"])
    save_model(tmp_path / "out", config, {name: jnp.asarray(a) for name, a in named.items()})
    assert_same(to_named(load_model(str(tmp_path / "out")).params, config), named)


def test_an_earlier_export_is_replaced_and_nothing_else_is_left(tmp_path):
    config = from_hf(HF_CONFIGS["llama"])
    save_model(tmp_path / "out", config, named_of("llama"))
    second = random_named(config, seed=1)
    save_model(tmp_path / "out", config, second)
    assert_same(to_named(load_model(str(tmp_path / "out")).params, config), second)
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_something_else_is_never_overwritten(tmp_path):
    config = from_hf(HF_CONFIGS["llama"])
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        save_model(tmp_path, config, named_of("llama"))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(ValueError, match="it is a file"):
        save_model(tmp_path / "thesis.tex", config, named_of("llama"))


def test_a_save_that_fails_leaves_the_earlier_export_whole(tmp_path):
    config = from_hf(HF_CONFIGS["llama"])
    save_model(tmp_path / "out", config, named_of("llama"))

    class FullDisk:
        stop_ids, pad_id, bos_id = frozenset({2}), 2, None

        def save(self, folder):
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        save_model(tmp_path / "out", config, random_named(config, seed=1), FullDisk())
    assert_same(to_named(load_model(str(tmp_path / "out")).params, config), named_of("llama"))
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda named: named.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda named: named.update(more=np.ones(1, np.float32)), "more"),
        (lambda named: named.update({"model.norm.weight": np.ones(3, np.float32)}), "wrong shape"),
        (lambda named: named.update({"model.norm.weight": np.ones(32)}), "float64"),
    ],
)
def test_a_wrong_model_is_not_saved(tmp_path, change, message):
    named = named_of("llama")
    change(named)
    with pytest.raises(ValueError, match=message):
        save_model(tmp_path / "out", from_hf(HF_CONFIGS["llama"]), named)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_float16_cannot_hold_is_saved_in_float32(tmp_path):
    named = named_of("llama")
    large = "model.layers.1.mlp.up_proj.weight"
    named[large][2, 3] = 70_000
    dtypes = dict.fromkeys(named, np.dtype(np.float16))
    cast = hf_export.cast_to_stored(named, dtypes)
    assert {name for name in cast if cast[name].dtype != np.float16} == {large}
    np.testing.assert_array_equal(cast[large], named[large])


# --- public cases


def row_config(row: dict, name: str) -> dict:
    config = {k: v for k, v in HF_CONFIGS[name].items() if k != "tie_word_embeddings"}
    tie = row.get("tie_word_embeddings", "absent")
    return config if tie == "absent" else {**config, "tie_word_embeddings": tie}


@pytest.mark.shared
def test_m01_heads(cases, tmp_path, caplog):
    whole = named_of("qwen2")
    body = {name: whole[name] for name in whole if "layers" in name or "norm" in name}
    outcomes = []
    for number, row in enumerate(cases("model")["M01"]["input"]["rows"]):
        caplog.clear()
        named = {**body, **{name: whole[name] for name in row["tensors"]}}
        folder = write_folder(tmp_path / str(number), row_config(row, "qwen2"), {SINGLE: named})
        try:
            model = load_model(str(folder))
        except ValueError as error:
            outcomes.append(str(error))
            continue
        head = head_weight(model.params)
        same_as = [name for name in row["tensors"] if np.array_equal(head, whole[name])]
        outcomes.append((same_as, caplog.text))
    assert outcomes[0] == (["model.embed_tokens.weight"], "")
    assert outcomes[1] == (["lm_head.weight"], "")
    assert "lm_head.weight" in outcomes[2]
    assert outcomes[3][0] == ["model.embed_tokens.weight"]
    assert "the config wins" in outcomes[3][1]
    # The documented default is untied, so the head that is not stored is an error.
    assert "lm_head.weight; tie_word_embeddings is false" in outcomes[4]


@pytest.mark.shared
def test_m03_shards(cases, tmp_path):
    case = cases("model")["M03"]["input"]
    whole, shards = named_of("llama"), {}
    for place, name in enumerate(whole):
        files = list(case["weight_map"].values())
        shards.setdefault(case["weight_map"].get(name, files[place % 3]), {})[name] = whole[name]
    outcomes = []
    for number, row in enumerate(case["rows"]):
        folder = write_folder(tmp_path / str(number), HF_CONFIGS["llama"], shards)
        kept = {file.split(" ")[0] for file in row["files"]}
        for file in set(shards) - kept:
            (folder / file).unlink()
        if not kept:
            (folder / "model.safetensors.index.json").unlink()
        if SINGLE in kept:
            stray = random_named(from_hf(HF_CONFIGS["llama"]), seed=5)
            write_folder(folder, HF_CONFIGS["llama"], {SINGLE: stray})
        for file in (file.split(" ")[0] for file in row["files"] if "truncated" in file):
            content = (folder / file).read_bytes()
            (folder / file).write_bytes(content[: len(content) // 2])
        try:
            check_model_files(str(folder))
            model = load_model(str(folder))
            assert_same(to_named(model.params, model.config), whole)
            outcomes.append("loads")
        except ValueError as error:
            outcomes.append(str(error))
    assert "lacks model-00002-of-00003.safetensors" in outcomes[0]
    assert outcomes[1] == "loads"
    assert "model-00002-of-00003.safetensors is cut short" in outcomes[2]
    assert str(tmp_path / "3") in outcomes[3] and SINGLE in outcomes[3]


@pytest.mark.shared
def test_m07_biases(cases, tmp_path):
    outcomes = []
    for number, row in enumerate(cases("model")["M07"]["input"]["rows"]):
        name = row["model_type"]
        whole = {**named_of("llama-biases"), **named_of(name)}
        named = {
            tensor: whole[tensor]
            for tensor in whole
            if tensor in expected_shapes(from_hf(HF_CONFIGS[name])) and "self_attn" not in tensor
        }
        for layer in range(2):
            for leaf in row["tensors"]:
                named[f"model.layers.{layer}.{leaf}"] = whole[f"model.layers.{layer}.{leaf}"]
        folder = write_folder(tmp_path / str(number), HF_CONFIGS[name], {SINGLE: named})
        try:
            load_model(str(folder))
            outcomes.append("loads")
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[2] == "loads"
    for layer in range(2):
        for matrix in "qkv":
            assert f"model.layers.{layer}.self_attn.{matrix}_proj.bias" in outcomes[1]
    assert "model.layers.0.self_attn.q_proj.bias" in outcomes[3]


# --- values


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named_with_file_and_place(tmp_path, dtype, value):
    named = named_of("qwen2", dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    named[name][2, 3] = value
    path = str(single(tmp_path / "m", "qwen2", named))
    check_model_files(path)  # reads headers only
    with pytest.raises(
        ValueError, match=rf"model\.safetensors: {re.escape(name)} holds -?(nan|inf) at \[2, 3\]"
    ):
        load_model(path)


def test_the_largest_finite_weights_load(tmp_path):
    named = named_of("qwen2", BF16)
    named["model.norm.weight"][0] = ml_dtypes.finfo(BF16).max
    assert load_model(str(single(tmp_path / "m", "qwen2", named))).kind == "folder"
