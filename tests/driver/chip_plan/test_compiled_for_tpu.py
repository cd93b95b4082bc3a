"""`python -m driver.plan` in its own process: the TPU compiler on two layers of a narrow model."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[3]

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)


REFERENCE = "deploy/runs/gsm8k_qwen25_3b_v6e8.yaml"
SEPARATE = (
    "placement.mode=separate",
    "placement.learner.tpus=4",
    "placement.rollout.tpus=4",
    "learner.mesh.fsdp=4",
)


def plan(*arguments):
    where = ("--config", REFERENCE, "--topology", "v6e:2x4")
    return subprocess.run(
        [sys.executable, "-m", "driver.plan", *where, *map(str, arguments)],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def narrow_model(tmp_path):
    """config.json of a Qwen2 with the reference model's heads and little else of its size."""
    path = tmp_path / "config.json"
    config = {
        "model_type": "qwen2",
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    path.write_text(json.dumps(config))
    return path


def check_narrow(narrow_model, tmp_path, role, usable_gib, *changes):
    """One role on two layers and without evaluation: the command's outcome and its report."""
    report = tmp_path / "report.json"
    without_eval = ("eval.every_steps=0", "eval.at_start=false", "eval.at_end=false")
    done = plan(
        *("--model-config", narrow_model, "--layers", 2, "--role", role, "--json", report),
        *("--usable-gib", usable_gib),
        *(f"--set={one}" for one in (*SEPARATE, *without_eval, *changes)),
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(report.read_text())
    assert found["model"]["layers"] == 2
    for program in found["programs"]:
        assert program["error"] == ""
        assert sum(program["parts"].values()) == program["needs_bytes"] >= program["peak_bytes"]
        assert program["model_ms_never_measured"] > 0
    return done, found, {program["name"]: program for program in found["programs"]}


# 2048 x 512 + 512 of embedding and norm; a layer has q and o of 512 x 512, k and v of 256 x 512,
# three matrices of 1024 x 512, biases of 512 + 2 x 256 and two norms of 512.
VECTORS = 512 + 2 * (1024 + 2 * 512)
MATRICES = 2048 * 512 + 2 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 1024 * 512)


@pytest.mark.slow
@needs_compiler
def test_the_learner_compiles_and_a_chip_that_is_too_small_fails_it(narrow_model, tmp_path):
    # The kernels of the head take the compiler minutes for a chunk of 1536 tokens.
    one_row = ("learner.microbatch_tokens=128", "rollout.max_prompt_tokens=32")
    one_row += ("rollout.max_completion_tokens=96",)
    in_reward = ("algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_in=reward")
    critic = ("algorithm.advantage=gae", "algorithm.entropy_target=0.2")
    done, found, programs = check_narrow(
        narrow_model, tmp_path, "learner", 0.02, *one_row, *in_reward, *critic
    )
    assert done.returncode == 1 and not found["fits"]
    assert "learner does NOT fit" in done.stdout
    scored = "score of the reference"
    names = ["empty", "accumulate", "score of the critic", scored, "apply", "snapshot", "canary"]
    assert list(programs) == names
    head = 512 + 1  # of the critic, never published
    # Two float32 moments: matrices cut over four chips, vectors whole; and two int32 counts.
    moments_bytes = 2 * 4 * (MATRICES // 4 + VECTORS + head) + 2 * 4
    snapshot_bytes = 2 * (MATRICES // 4 + VECTORS)  # bfloat16
    reference_bytes = snapshot_bytes  # bfloat16 too
    params_bytes = 4 * (MATRICES // 4 + VECTORS + head)
    named = {
        "parameters": params_bytes,
        "optimiser state": moments_bytes,
        "gradients": params_bytes,
        "frozen models": reference_bytes,
        "published snapshots": 2 * snapshot_bytes,
    }
    parts = programs["accumulate"]["parts"]
    assert {name: parts[name] for name in named} == named
    assert parts["temporaries"] > 0
    named.pop("gradients")
    assert named.items() <= programs[scored]["parts"].items()
    wires = programs["accumulate"]["wires"]
    # Forward and backward gather each layer's matrices in bfloat16, and three of four parts travel.
    in_layers = MATRICES - 2048 * 512
    assert wires["all-gather"][1] >= 2 * 2 * in_layers * 3 // 4
    assert "lora.rank=16" in done.stdout or "none of the settings" in done.stdout


@pytest.mark.slow
@needs_compiler
def test_the_worker_compiles_and_fits_a_chip(narrow_model, tmp_path):
    done, found, programs = check_narrow(narrow_model, tmp_path, "worker", usable_gib=31.25)
    assert done.returncode == 0 and found["fits"]
    assert "worker fits" in done.stdout
    assert list(programs) == ["empty", "prefill", "segment"], "a kernel needs one width of cache"
    policy_bytes = 2 * (MATRICES + VECTORS)  # bfloat16, whole on every chip
    parts = programs["segment"]["parts"]
    assert parts["policy"] == parts["policy that arrives"] == policy_bytes
    # 32 slots of a chip hold 1536 columns of keys and values, 2 heads of 128, in each of 2 layers.
    cache_bytes = 2 * 2 * (32 * 1536 * 2 * 128 * 2)
    assert parts["KV cache"] == pytest.approx(cache_bytes, rel=0.001)  # and a few numbers a slot


@pytest.mark.slow
@needs_compiler
def test_a_model_that_is_cut_over_the_chips_compiles_and_its_cache_grows(narrow_model, tmp_path):
    changes = ("rollout.decode.tensor=4", "rollout.decode.attention=bf16")
    _, found, programs = check_narrow(narrow_model, tmp_path, "worker", 31.25, *changes)
    assert found["fits"]
    assert list(programs) == ["empty", "prefill", "segment", "resize"]
    # Norms and biases: final, two a layer, and o_proj has none; those of q, k and v are cut, and
    # each of the two key/value heads is on two chips.
    norms = 512 + 2 * 2 * 512
    heads = 2 * 2 * (256 * 512 + 256)  # of keys and values, in two layers
    cut = MATRICES - 2 * 2 * 256 * 512 + 2 * 512
    policy_bytes = 2 * (norms + heads // 2 + cut // 4)
    assert programs["segment"]["parts"]["policy that arrives"] == policy_bytes
    assert programs["segment"]["wires"]["all-reduce"][0] > 2  # of every layer, and of a token
    # 128 slots of 1536 columns with one head of 128 in each of 2 layers; before, half as wide.
    cache_bytes = 2 * 2 * (128 * 1536 * 128 * 2)
    assert programs["resize"]["parts"]["KV cache"] == cache_bytes // 2 + cache_bytes


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("role", ["learner", "worker"])
def test_the_programs_of_an_adapter_compile_and_hold_the_model_once(narrow_model, tmp_path, role):
    changes = ("learner.microbatch_tokens=128", "rollout.max_prompt_tokens=32")
    changes += ("rollout.max_completion_tokens=96", "learner.lora.rank=8", "algorithm.kl_coef=0.1")
    _, found, programs = check_narrow(narrow_model, tmp_path, role, 31.25, *changes)
    assert found["fits"]
    # Rank 8 beside q and o, k and v, and the three matrices of the MLP, in each of two layers.
    adapter = 2 * 8 * (2 * (512 + 512) + 2 * (512 + 256) + 3 * (512 + 1024))
    if role == "worker":
        assert programs["segment"]["parts"]["policy that arrives"] == 2 * adapter
        return
    # Two float32 moments and two snapshots in bfloat16, all of the adapter cut over four chips;
    # the base is an argument of the program, and the reference as well.
    moments_bytes = 2 * 4 * adapter // 4 + 2 * 4
    parts = programs["accumulate"]["parts"]
    assert parts["optimiser state"] == moments_bytes
    assert parts["published snapshots"] == 2 * 2 * adapter // 4
    assert parts["parameters"] == parts["gradients"] == 4 * adapter // 4
    assert parts["frozen models"] == 2 * (MATRICES // 4 + VECTORS)
