import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import transformers

from driver.config.load_config import ConfigError, load
from driver.config.plan import Devices, asked_devices, derive, format_plan
from driver.config.prepare import prepare
from driver.config.run_config import RunConfig
from models.config import ModelConfig
from models.files.checkpoint import expected_shapes, save_model
from rollout_worker.engine_setup import EngineSetup
from tests.deadlines import HANG_S

ROOT = pathlib.Path(__file__).resolve().parents[3]
ONE = Devices(learner=1, worker=1)

QWEN_3B = ModelConfig(
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_layers=36,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    qkv_bias=True,
)

TINY = ModelConfig(
    model_type="llama",
    vocab_size=40,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def config_of(*, path="m", train=None, held_out=None, **sections):
    """A run of 4 prompts x 8 completions; `learner={...}` and the like change sections."""
    values = {
        "model": {"path": path},
        "data": {"train": train or {"source": "train.jsonl"}, "eval": held_out},
        "rollout": {
            "prompts_per_step": 4,
            "completions_per_prompt": 8,
            "max_prompt_tokens": 16,
            "max_completion_tokens": 16,
            "decode": {"slots": 32, "prefixes": 4},
        },
        "learner": {"microbatch_tokens": 384},
        "eval": {"at_start": held_out is not None, "at_end": held_out is not None},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values)


def refusal(call, *arguments):
    with pytest.raises(ConfigError) as refused:
        call(*arguments)
    return str(refused.value)


def test_f05_geometries_are_refused_or_filled_up(cases):
    rows = cases("config")["F05"]["input"]["rows"]
    verdicts = cases("config")["F05"]["expected"]
    for row, verdict in zip(rows, verdicts, strict=True):
        rollout = {
            "prompts_per_step": row["prompts_per_step"],
            "completions_per_prompt": row["group_size"],
            "workers": row.get("workers", 2),
        }
        learner = {"microbatch_tokens": 64 * row.get("micro_batch", 8)}
        devices = Devices(learner=row.get("devices", 1), worker=1)

        def build(rollout=rollout, learner=learner, devices=devices):
            base = config_of().rollout.model_dump()
            config = config_of(rollout={**base, **rollout}, learner=learner)
            return derive(config, TINY, devices)

        if verdict.startswith("refuse") and "fill up" not in verdict:
            with pytest.raises(ValueError, match="at least 2|greater than or equal"):
                build()
            continue
        plan = build()
        assert plan.completions_per_step == row["prompts_per_step"] * row["group_size"]
        covered = plan.microbatches_per_update * plan.microbatch_rows
        assert 0 <= covered - plan.completions_per_step < plan.microbatch_rows


def test_five_prompts_over_two_workers_lose_nothing():
    rollout = {**config_of().rollout.model_dump(), "prompts_per_step": 5}
    rollout |= {"completions_per_prompt": 4, "workers": 2}
    plan = derive(config_of(rollout=rollout), TINY, ONE)
    assert (plan.completions_per_step, plan.worker_completions) == (20, 12)  # 3 and 2 prompts


def test_an_episode_may_be_as_many_records_as_it_has_turns():
    environment = {"name": "deploy/demo/guessing.py:Guessing", "max_turns": 3}
    kept, several = (
        derive(config_of(environment=environment | {"history": history}), TINY, ONE)
        for history in ("keep", "new_record")
    )
    assert (kept.completions_per_step, kept.positions_per_step) == (32, 32 * 32)
    assert (several.completions_per_step, several.positions_per_step) == (32, 3 * 32 * 32)
    assert several.completion_tokens_per_step == 3 * kept.completion_tokens_per_step
    assert (kept.microbatches_per_update, several.microbatches_per_update) == (6, 16)


def test_sizes_by_hand():
    plan = derive(config_of(), TINY, ONE)
    # 4 prompts x 8; two workers take 2 prompts each
    assert plan.completions_per_step == 32
    assert plan.completion_tokens_per_step == 32 * 16
    assert plan.positions_per_step == 32 * 32
    assert plan.worker_completions == 16
    assert (plan.worker.lanes, plan.worker.lane_slots, plan.worker.cache_tokens) == (1, 32, 32)
    # 31 input tokens fit the smallest bucket of 64; 384 // 64 = 6 rows; 32 / 6 -> 6
    assert (plan.row_tokens, plan.microbatch_rows, plan.microbatches_per_update) == (64, 6, 6)
    # 40*8 + 2*(64 + 32 + 32 + 64 + 3*128 + 16) + 8
    assert plan.parameters == 320 + 2 * 592 + 8
    assert plan.learner_bytes_per_device == 4 * 4 * plan.parameters  # weights, m, v, gradient
    assert plan.worker.policy_bytes == 2 * plan.parameters
    # 32 slots x 32 columns, and 4 prompts of 15, x 2 layers x (key, value) x 1 head x 4 numbers,
    # which are float32 on a CPU
    assert plan.worker.cache_bytes == 32 * 32 * 2 * 2 * 4 * 4
    assert plan.worker.pool_bytes == 4 * 15 * 2 * 2 * 4 * 4
    # empty, a prefill of 15 tokens, a segment
    assert plan.worker.programs == 3


def test_the_reference_run_has_the_known_sizes():
    config = load(str(ROOT / "deploy" / "runs" / "gsm8k_qwen25_3b_v6e8.yaml"))
    devices = asked_devices(config)
    assert devices == Devices(learner=8, worker=8, shared=True)
    plan = derive(config, QWEN_3B, devices)
    assert plan.parameters == 3_085_938_688  # as published for the model
    assert plan.completions_per_step == 128 and plan.mesh == (1, 8, 1)
    assert plan.learner_bytes_per_device == 4 * 4 * 3_085_938_688 // 8
    assert plan.wire_bytes_per_version == 2 * 3_085_938_688
    assert (plan.worker.lanes, plan.worker.lane_slots) == (8, 16)
    assert plan.worker.attention.impl == "pallas_tpu"
    assert plan.worker.cache_bytes == 16 * 1536 * 36 * 2 * 2 * 128 * 2
    assert plan.worker.policy_bytes == 2 * 3_085_938_688
    assert plan.shared_bytes_per_device is not None
    assert 19e9 < plan.shared_bytes_per_device < 20e9
    assert plan.notes == ()


@pytest.mark.parametrize(
    "optimizer, algorithm, bytes_per_parameter",
    [("adamw", {}, 16), ("lion", {}, 12), ("sgd", {}, 8), ("adamw", {"kl_coef": 0.1}, 18)],
)
def test_learner_state_counts_moments_and_reference(optimizer, algorithm, bytes_per_parameter):
    config = config_of(
        learner={"microbatch_tokens": 384, "optimizer": {"name": optimizer}}, algorithm=algorithm
    )
    plan = derive(config, TINY, ONE)
    assert plan.learner_bytes_per_device == bytes_per_parameter * plan.parameters


def test_a_critic_counts_in_the_learner_and_not_on_the_wire():
    plain = derive(config_of(), TINY, ONE)
    plan = derive(config_of(algorithm={"advantage": "gae"}), TINY, ONE)
    more = plan.learner_bytes_per_device - plain.learner_bytes_per_device
    assert more == 4 * 4 * (TINY.hidden_size + 1)  # float32 weights, m, v, gradient
    assert plan.wire_bytes_per_version == plain.wire_bytes_per_version
    assert "advantage gae (gamma 1, lambda 0.95)" in plan.loss


@pytest.mark.parametrize(
    "mesh, devices, part",
    [
        ({"data": 1, "fsdp": 4}, 3, "data x fsdp = 4 must equal the 3 devices"),
        ({"data": 2, "fsdp": -1}, 3, "3 devices are not divisible by 2"),
        ({"fsdp": 1, "context": 2}, 4, "data x fsdp x context = 2 must equal the 4 devices"),
        ({"context": 4}, 6, "learner.mesh.context=4: 6 devices are not divisible by 4"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(mesh, devices, part):
    config = config_of(learner={"microbatch_tokens": 384, "mesh": mesh})
    assert part in refusal(derive, config, TINY, Devices(learner=devices, worker=1))


def test_devices_that_share_rows_have_longer_ones_and_fewer():
    """The sequences of 32 tokens need a row of 64, of which 32 fit a device."""
    learner = {"microbatch_tokens": 64, "mesh": {"data": 1, "fsdp": -1}}
    alone = derive(config_of(learner=learner), TINY, Devices(learner=4, worker=1))
    learner = {"microbatch_tokens": 16, "mesh": {"data": 1, "fsdp": -1, "context": 4}}
    shared = derive(config_of(learner=learner), TINY, Devices(learner=4, worker=1))
    assert (alone.mesh, shared.mesh) == ((1, 4, 1), (1, 1, 4))
    assert (alone.microbatch_rows, shared.microbatch_rows) == (4, 1)
    assert alone.row_tokens == shared.row_tokens == 64
    assert alone.learner_bytes_per_device == shared.learner_bytes_per_device
    assert "mesh data=1 x fsdp=1 x context=4; state" in format_plan(shared)


def test_s05_more_positions_than_the_model_knows_are_refused(cases):
    row = cases("sampling")["S05"]["input"]["rows"][3]
    rollout = config_of().rollout.model_dump() | {
        "max_prompt_tokens": row["max_prompt_length"],
        "max_completion_tokens": row["max_new_tokens"],
    }
    model = TINY.__class__(**{**vars(TINY), "max_position_embeddings": 24})
    message = refusal(derive, config_of(rollout=rollout), model, ONE)
    assert "rollout.max_prompt_tokens=16 + rollout.max_completion_tokens=16 = 32" in message
    assert "max_position_embeddings=24" in message


def decode_of(**changes):
    """The run of config_of with some keys of rollout.decode changed."""
    rollout = config_of().rollout.model_dump()
    return config_of(rollout={**rollout, "decode": {**rollout["decode"], **changes}})


@pytest.mark.parametrize(
    "changes, devices, part",
    [
        ({}, 3, "rollout.decode.slots=32 must be a multiple of the 3 lanes"),
        ({}, 3, "3 device(s) / rollout.decode.tensor=1): set it to 33"),
        ({"prefixes": 3}, 2, "rollout.decode.prefixes=3 must be a multiple of the 2 lanes"),
        ({"tensor": 3}, 4, "tensor=3 must divide the 4 device(s) of a worker: set it to one of"),
    ],
)
def test_slots_must_be_shared_out_over_a_workers_devices(changes, devices, part):
    message = refusal(derive, decode_of(**changes), TINY, Devices(learner=1, worker=devices))
    assert part in message


def test_k01_a_cut_that_the_model_does_not_allow_is_refused_before_any_device(cases):
    case = cases("sharding")["K01"]
    for row, verdict in zip(case["input"]["rows"], case["expected"]["verdict"], strict=True):
        heads, kv_heads, tensor = row
        model = dataclasses.replace(
            TINY, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=14 * 48
        )
        devices = Devices(learner=1, worker=tensor)
        if verdict.startswith("reject"):
            message = refusal(derive, decode_of(tensor=tensor), model, devices)
            assert f"rollout.decode.tensor={tensor} does not fit" in message
        else:
            assert derive(decode_of(tensor=tensor), model, devices).worker.lanes == 1


def test_a_policy_that_is_cut_takes_less_of_each_device():
    plan = derive(decode_of(tensor=2), TINY, Devices(learner=1, worker=2))
    assert (plan.worker.lanes, plan.worker.lane_slots) == (1, 32)
    # Norms stay whole, and the only key/value head is on both devices.
    matrices, heads, norms = 40 * 8 + 2 * (2 * 64 + 3 * 128), 2 * 2 * 32, 2 * 16 + 8
    assert plan.worker.policy_bytes == 2 * (matrices // 2 + heads + norms)
    assert plan.worker.cache_bytes == 32 * 32 * 2 * 2 * 4 * 4


@pytest.mark.parametrize(
    "attention, dtype, platform, head_dim, impl, operands",
    [
        ("auto", "bfloat16", "tpu", 128, "pallas_tpu", "bfloat16"),
        ("auto", "bfloat16", "tpu", 64, "xla", "bfloat16"),
        ("auto", "float32", "cpu", 128, "xla", "float32"),
        ("bf16", "float32", "tpu", 128, "xla", "bfloat16"),
        ("f32", "bfloat16", "gpu", 128, "xla", "float32"),
        ("pallas", "float32", "cpu", 4, "pallas_interpret", "float32"),
    ],
)
def test_what_attends_in_decoding(attention, dtype, platform, head_dim, impl, operands):
    found = setup_of(attention, dtype, platform, head_dim).attention
    assert (found.impl, found.operand_dtype.name) == (impl, operands)


@pytest.mark.parametrize(
    "platform, head_dim, part",
    [("gpu", 128, "no such kernel for platform gpu; set it to auto"), ("tpu", 64, "is 64; set it")],
)
def test_a_kernel_that_is_not_there_is_refused(platform, head_dim, part):
    with pytest.raises(ValueError, match=f"rollout.decode.attention=pallas: .*{part}"):
        _ = setup_of("pallas", "bfloat16", platform, head_dim).attention


def setup_of(attention, dtype, platform, head_dim):
    return EngineSetup(
        rollout=decode_of(attention=attention, compute_dtype=dtype).rollout,
        model=dataclasses.replace(TINY, head_dim=head_dim),
        platform=platform,
        weights_dtype="bfloat16",
    )


def test_a_loss_without_an_implementation_on_the_platform_is_refused():
    placement = {"platform": "gpu", "learner": {"gpus": 1}, "rollout": {"gpus": 1}}
    config = config_of(learner={"loss_impl": "pallas"}, placement=placement)
    with pytest.raises(ConfigError, match="learner.loss_impl=pallas: .*'gpu': take `xla`"):
        derive(config, TINY, ONE)


def test_the_plan_says_what_computes_the_loss():
    plan = derive(config_of(learner={"lm_head": "lean"}), TINY, ONE)
    said = "loss: clip of token ratios, advantage group_norm, token_mean; lm_head=lean by xla"
    assert said in format_plan(plan).splitlines()
    plan = derive(config_of(learner={"loss_impl": "pallas"}), TINY, ONE)
    assert "learner.loss_impl=pallas is interpreted on cpu" in format_plan(plan)


def test_the_plan_says_what_attends_in_training():
    said = format_plan(derive(config_of(), TINY, ONE))
    assert "attention: xla, and reference for rows of up to 64 tokens" in said.splitlines()
    plan = derive(config_of(learner={"attention": "pallas"}), TINY, ONE)
    assert "learner.attention=pallas is interpreted on cpu" in format_plan(plan)
    placement = {"platform": "gpu", "learner": {"gpus": 1}, "rollout": {"gpus": 1}}
    config = config_of(learner={"attention": "pallas"}, placement=placement)
    with pytest.raises(ConfigError, match="learner.attention=pallas: .*'gpu': take `xla`"):
        derive(config, TINY, ONE)


def test_whole_scores_that_fill_the_memory_get_a_note():
    sizes = {"max_prompt_tokens": 100, "max_completion_tokens": 16000}
    model = dataclasses.replace(TINY, max_position_embeddings=20_000)
    plan = lambda attention: format_plan(
        derive(
            config_of(learner={"attention": attention, "microbatch_tokens": 16384}, rollout=sizes),
            model,
            ONE,
        )
    )
    heads = model.num_heads
    note = f"learner.attention=reference holds {heads * 16384**2 * 4 / 1e9:.2f} GB of scores"
    assert note in plan("reference")
    assert "of scores for each row" not in plan("auto")


def test_the_reference_loss_needs_whole_logits():
    with pytest.raises(ValueError, match="lm_head=fast with loss_impl=reference: .* lm_head to"):
        config_of(learner={"loss_impl": "reference"})
    config_of(learner={"loss_impl": "reference", "lm_head": "logits"})


def test_a_warm_up_that_outlasts_the_run_is_refused():
    optimizer = {"warmup_steps": 10}
    config = config_of(
        run={"steps": 5},
        learner={"microbatch_tokens": 384, "optimizer": optimizer, "updates_per_batch": 2},
    )
    assert "warmup_steps=10 must be below" in refusal(derive, config, TINY, ONE)


@pytest.mark.parametrize(
    "placement, part",
    [
        ({"platform": "tpu", "learner": {"tpus": 4}}, "placement.rollout.tpus=0"),
        ({"platform": "gpu", "learner": {"gpus": 1.5}}, "placement.learner.gpus=1.5"),
        ({"platform": "gpu", "learner": {"gpus": 1.5}}, "must be 1, 2, .. or between 0 and 1"),
        ({"platform": "gpu"}, "set placement.learner.gpus=1"),
        ({"platform": "gpu", "learner": {"gpus": 1}}, "set placement.rollout.gpus=1"),
        ({"platform": "tpu", "learner": {"tpus": 0.5}}, "must be a whole number of chips"),
        ({"platform": "cpu", "learner": {"gpus": 1}}, "set placement.platform=gpu"),
    ],
)
def test_resources_must_fit_the_platform(placement, part):
    assert part in refusal(asked_devices, config_of(placement=placement))


def test_half_a_gpu_is_one_device():
    half = {"platform": "gpu", "learner": {"gpus": 0.5}, "rollout": {"gpus": 0.5}}
    assert asked_devices(config_of(placement=half)) == ONE
    assert asked_devices(config_of()) == ONE


def test_a_cpu_is_as_many_devices_as_jax_makes_of_it():
    asked = asked_devices(config_of(), cpu_devices=4)
    assert (asked.learner, asked.worker) == (4, 4)
    text = format_plan(derive(config_of(), TINY, asked))
    assert "worker: 4 devices; " in text and "by each of 4 copies of the policy" in text


@pytest.mark.parametrize(
    "sections, part",
    [
        ({"rollout": {"workers": 3}}, "16 of rollout.decode.slots=32 are never filled"),
        ({"rollout": {"workers": 3}}, "prompts_per_step=4 does not divide by rollout.workers=3"),
        ({"weights": {"dtype": "float32"}}, "reads the float32 weights, twice the bytes"),
        (
            {"eval": {"top_k": 5}, "data": {"eval": {"source": "eval.jsonl"}}},
            "eval.temperature=0 takes the likeliest token",
        ),
        (
            {
                "eval": {"every_steps": 7},
                "data": {"eval": {"source": "eval.jsonl"}},
                "checkpoint": {"every_steps": 20},
            },
            "eval.every_steps=7 and checkpoint.every_steps=20 have no step before the last",
        ),
        ({"decode": {"attention": "pallas"}}, "rollout.decode.attention=pallas is interpreted"),
        ({"decode": {"compile_budget": 2}}, "compile_budget=2 is below the 3 programs"),
    ],
)
def test_what_is_probably_not_meant_is_noted(sections, part):
    base = config_of(rollout=decode_of(**sections.pop("decode", {})).rollout.model_dump())
    changed = {name: {**base.model_dump()[name], **section} for name, section in sections.items()}
    found = derive(RunConfig.model_validate({**base.model_dump(), **changed}), TINY, ONE).notes
    assert any(part in note for note in found), found


def test_plan_is_shown_with_its_numbers():
    text = format_plan(derive(config_of(), TINY, ONE))
    assert "step: 32 completions, at most 512 sampled tokens and 1,024 training positions" in text
    assert "mesh data=1 x fsdp=1 x context=1; state" in text
    assert "up to 6 micro-batches of 6 rows x 64 tokens; 100 updates in the run" in text
    assert "wire: 3.02 kB to each worker" in text
    assert "of prefilled prompts\n" in text


def test_the_plan_counts_the_episodes_that_are_parked():
    config = config_of(environment={"name": "my.games:Game"}, rollout={"held_per_slot": 4})
    plan = derive(config, TINY, ONE)
    parked = config.rollout.worker_groups * config.rollout.completions_per_prompt
    assert f"of prefilled prompts and {parked} parked episodes" in format_plan(plan)


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A Hugging Face folder of TINY with a word tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    generator = np.random.default_rng(0)
    named = {
        name: generator.normal(size=shape).astype(np.float32)
        for name, shape in expected_shapes(TINY).items()
    }
    save_model(str(folder), TINY, named)
    words = ["</s>", "<unk>", "<user>", "<system>", "<assistant>", "+", "?", *"0123456789"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def source(tmp_path):
    """Writes items as JSONL and returns their source section."""

    def write(name, questions):
        path = tmp_path / name
        lines = [json.dumps({"question": q, "answer": "#### 3"}) for q in questions]
        path.write_text("\n".join(lines) + "\n")
        return {"source": str(path)}

    return write


@pytest.fixture
def config(tiny_model, source):
    train = source("train.jsonl", ["1 + 2 ?"] * 9 + ["1 + 2 ? " * 30])
    held_out = source("eval.jsonl", ["2 + 2 ?"] * 3)
    return config_of(path=tiny_model, train=train, held_out=held_out, eval={"prompts": 2})


def test_dry_run_reports_prompts_sizes_and_rewards(config):
    prepared = prepare(config)
    assert (prepared.order.count, prepared.held_out) == (9, (3,))
    for part in (
        "llama of 2 layers, 1,512 parameters, vocabulary 40",
        "tokenizer: 17 tokens, stop ids 0, pad id 0",
        "data.train: 9 prompts from",
        "1 left out with more than 16 tokens (line 10 with ",
        "), 44.44 epochs in the run",
        "data.eval: 3 prompts from",
        "2 evaluated",
        "reward: gsm8k_answer x 1",
        "step: 32 completions",
    ):
        assert part in prepared.text, part


def test_dry_run_touches_no_device(config, tmp_path):
    from driver.config.load_config import dump

    path = tmp_path / "run.yaml"
    path.write_text(dump(config))
    script = (
        "import sys, jax\n"
        "from jax._src import xla_bridge\n"
        "from driver.config.prepare import prepare\n"
        "from driver.config.load_config import load\n"
        "print(prepare(load(sys.argv[1])).text)\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "assert 'ray' not in sys.modules\n"
        "jax.devices()\n"
        "assert xla_bridge._backends\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert "data.train: 9 prompts" in done.stdout


def test_the_shell_is_read_before_anything_starts_N30(config, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    text = prepare(config).text
    assert "note: JAX_ENABLE_X64=1 of this shell does not hold" in text
    assert "worker: 2 devices; " in text
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert "XLA_FLAGS of this shell has --xla_cpu_enable_fast_math=true" in refusal(prepare, config)


def with_model(config, **changes):
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def test_a_missing_model_is_one_message(config, tmp_path):
    missing = str(tmp_path / "nowhere" / "model.gguf")
    assert missing in refusal(prepare, with_model(config, path=missing))


def test_a_model_cut_short_is_refused(config, tiny_model, tmp_path):
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in pathlib.Path(tiny_model).iterdir():
        content = file.read_bytes()
        (cut / file.name).write_bytes(content[:-8] if file.suffix == ".safetensors" else content)
    assert "model.path=" in refusal(prepare, with_model(config, path=str(cut)))


def test_an_unknown_reward_function_is_refused(config):
    functions = (config.reward.functions[0].model_copy(update={"name": "gsm8k_anser"}),)
    reward = config.reward.model_copy(update={"functions": functions})
    assert "gsm8k_anser" in refusal(prepare, config.model_copy(update={"reward": reward}))


def test_a_source_without_a_fitting_prompt_is_refused(config, source):
    train = config.data.train.model_copy(update=source("long.jsonl", ["1 + 2 ? " * 30] * 2))
    data = config.data.model_copy(update={"train": train})
    message = refusal(prepare, config.model_copy(update={"data": data}))
    assert message.startswith("data.train: ") and "all 2 prompts are longer" in message
    assert "raise rollout.max_prompt_tokens" in message


def test_held_out_prompts_that_are_trained_on_are_noted(config):
    assert "also in data.train" not in prepare(config).text
    data = config.data.model_copy(update={"eval": config.data.train})
    text = prepare(config.model_copy(update={"data": data})).text
    assert "note: also in data.train: 9 prompts of data.eval" in text


def mixed(config, source):
    """20 questions in two sources, of which the second also has all of data.eval."""
    first = source("first.jsonl", ["1 + 2 ?"] * 15)
    second = source("second.jsonl", ["2 + 2 ?"] * 4 + ["1 + 2 ? " * 30])
    train = [{**first, "weight": 3}, {**second, "weight": 1, "name": "hard"}]
    return type(config).model_validate(
        config.model_dump() | {"data": {"train": train, "eval": config.data.eval.model_dump()}}
    )


def test_dry_run_reports_every_training_source(config, source):
    prepared = prepare(mixed(config, source))
    assert (prepared.order.count, prepared.order.seed) == (19, config.run.seed)
    taken = config.run.steps * config.rollout.prompts_per_step
    for part in (
        "data.train.0 (first): 15 prompts from",
        f"0.75 of what is drawn, {taken * 0.75 / 15:.2f} epochs in the run",
        "data.train.1 (hard): 4 prompts from",
        "1 left out with more than 16 tokens (line 5 with ",
        f"), 0.25 of what is drawn, {taken / 16:.2f} epochs",
        "note: also in data.train.1 (hard): 3 prompts of data.eval",
    ):
        assert part in prepared.text, part
    assert "also in data.train.0" not in prepared.text


def test_a_missing_data_file_is_refused(config):
    train = config.data.train.model_copy(update={"source": "nowhere.jsonl"})
    data = config.data.model_copy(update={"train": train})
    message = refusal(prepare, config.model_copy(update={"data": data}))
    assert message.startswith("data.train: ") and "nowhere.jsonl" in message


def with_data(config, **changes):
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


DATED = "{{ strftime_now('%H')[1] }} " + TEMPLATE
MOMENT = datetime.datetime(2026, 1, 31, 9, tzinfo=datetime.UTC)


def test_prompts_are_those_of_the_moment_whatever_the_time_is_N16(config):
    dated = with_model(config, chat_template=DATED)
    prepared = prepare(dated, MOMENT)
    assert prepared.moment == MOMENT
    assert "reads the clock, which stands at 2026-01-31 09:00:00+00:00" in prepared.text
    assert prepare(dated, MOMENT).data == prepared.data
    assert prepare(dated, MOMENT + datetime.timedelta(hours=1)).data != prepared.data
    assert "reads the clock" not in prepare(config, MOMENT).text
    assert prepare(config).moment.tzinfo is not None


def test_a_system_prompt_that_the_template_drops_is_refused(config):
    asked = with_data(config, system_prompt="1 2")
    assert prepare(asked)
    only_users = TEMPLATE.replace("in messages", "in messages if m['role'] == 'user'")
    message = refusal(prepare, with_model(asked, chat_template=only_users))
    assert message.startswith("model.chat_template leaves the system prompt, or a part of it, out")
    assert prepare(with_model(config, chat_template=only_users))


STYLED = "{{ style }} " + TEMPLATE


def test_arguments_of_the_template_decide_the_prompts_and_the_resume(config):
    styled = with_model(config, chat_template=STYLED)
    one, two = (prepare(with_data(styled, template_args={"style": s})) for s in ("1", "2"))
    assert one.data.differences(two.data) == ["prompts of data.train", "prompts of data.eval"]
    assert prepare(with_data(styled, template_args={"style": "1"})).data == one.data
    message = refusal(prepare, with_data(styled, template_args={"stile": "1"}))
    assert message.startswith("data.template_args.stile: model.chat_template does not read stile")
    assert "it reads: style; correct the name" in message
    tools = ({"type": "function", "function": {"name": "1"}},)
    assert refusal(prepare, with_data(config, tools=tools)).startswith("data.tools: ")
    offering = with_model(config, chat_template="{% if tools %}2{% endif %} " + TEMPLATE)
    assert prepare(with_data(offering, tools=tools)).data != prepare(offering).data


def test_a_template_that_ignores_the_generation_prompt_is_refused_or_noted(config):
    message = refusal(prepare, with_model(config, chat_template=TEMPLATE.partition("{% if")[0]))
    assert message.startswith("model.chat_template ignores add_generation_prompt")
    text = prepare(with_model(config, chat_template="{{ messages[0]['content'] }} ?")).text
    assert "note: model.chat_template ignores add_generation_prompt: prompts end in" in text


def test_special_tokens_in_the_texts_of_the_configuration_are_noted_N15(config):
    model = with_model(config, path=str(ROOT / "deploy" / "demo" / "model"))
    demo = model.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_prompt_tokens": 99})}
    )
    assert "spells" not in prepare(demo).text
    text = prepare(with_data(demo, system_prompt="Say <|im_end|>.")).text
    assert "note: data.system_prompt spells '<|im_end|>', which reaches the model as ordin" in text


def test_a_special_token_that_cannot_be_text_is_named_with_its_record_N15(config, source):
    """The tokenizer of this model takes words as they are."""
    train = config.data.train.model_copy(update=source("b.jsonl", ["1 + 1 ?", "1 </s> 2 ?"]))
    message = refusal(prepare, with_data(config, train=train))
    assert "b.jsonl, line 2: '</s>' is a special token that this tokenizer cannot" in message


@pytest.mark.parametrize("dtype, each", [("bfloat16", 2), ("float32", 4)])
def test_learner_state_counts_the_teacher_in_the_compute_dtype(dtype, each):
    config = config_of(
        learner={"microbatch_tokens": 384, "compute_dtype": dtype},
        algorithm={"distillation": {"teacher": "some/teacher", "coef": 0.5}},
    )
    # 40*8 + 4*(64 + 32 + 32 + 64 + 3*128 + 16) + 8, of twice as many layers
    plan = derive(config, TINY, ONE, dataclasses.replace(TINY, num_layers=4))
    assert plan.learner_bytes_per_device == 16 * plan.parameters + each * (320 + 4 * 592 + 8)
    assert "; distillation 0.5 x full from some/teacher, advantages x 0" in plan.loss
