"""The engine beside transformers and beside the learner's forward pass, on a real model."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.packed_attention.ops import plan_attention
from models.files.checkpoint import load_model, save_model, to_named
from models.load_tokenizer import load_tokenizer
from models.transformer import forward, head_weight, logits, packed_attend
from rollout_worker.engine.decode_request import DecodeRequest, SamplingSettings
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.engine_limits import EngineLimits
from rollout_worker.engine.layout import Layout, make_mesh
from rollout_worker.engine.slots import DecodeSpec
from services.process.phase_clock import PhaseClock
from tests.rollout_worker.engine.engines import run_to_end, unstack_layers

SMOLLM2 = pathlib.Path(__file__).parents[3] / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SMOLLM2.is_file(), reason="needs `make smollm2`"),
]
QUESTIONS = (
    "What is 123 + 45?",
    "Name three colours.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about rain.",
    "Count from one to twelve in words.",
    "Translate 'good morning' into French.",
    "A train goes 60 km in 45 minutes. How fast is it in km/h? Show your work step by step.",
    "Hi",
)
PROMPT_TOKENS, NEW_TOKENS = 64, 32
CACHE_TOKENS = PROMPT_TOKENS + NEW_TOKENS
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@pytest.fixture(scope="module")
def smollm2():
    return load_model(str(SMOLLM2)), load_tokenizer(str(SMOLLM2))


@pytest.fixture(scope="module")
def with_layers(smollm2):
    """The model, or the first layers of it, which are compiled and run in less time."""
    whole, _ = smollm2

    @functools.cache
    def of(layers=whole.config.num_layers):
        first = jax.tree.map(lambda leaf: leaf[:layers], whole.params["layers"])
        return dataclasses.replace(
            whole,
            config=dataclasses.replace(whole.config, num_layers=layers),
            params={**whole.params, "layers": first},
        )

    return of


@pytest.fixture(scope="module")
def prompts(smollm2):
    _, tokenizer = smollm2
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return [np.asarray(tokenizer.encode_chat(chat), np.int32) for chat in chats]


@pytest.fixture(scope="module")
def completions(smollm2, with_layers):
    """Decodes prompts; fewer slots than prompts, so that slots are taken over. The engines
    are shared: to compile their programs costs more than to run them."""
    _, tokenizer = smollm2

    @functools.cache
    def engine_of(dtype, *layers):
        model = with_layers(*layers)
        layout = Layout(model.config, make_mesh(jax.devices()[:1], 1, 1), np.dtype(dtype))
        spec = DecodeSpec(
            layout=layout,
            valid_vocab=tokenizer.vocab_size,
            compute_dtype=dtype,
            attention_dtype=dtype,
            attention_impl="xla",
            prefill_attention=plan_attention("auto", "cpu"),
            slots=6,
            segment_tokens=16,
            wide_cache=True,
        )
        limits = EngineLimits(
            max_prompt_tokens=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS, cache_tokens=CACHE_TOKENS
        )
        stops = tuple(tokenizer.stop_ids)
        engine = Engine(spec, limits, loop="while", stop_ids=stops, clock=PhaseClock())
        host = jax.tree.map(np.asarray, unstack_layers(model.params))
        engine.swap_policy(layout.to_inference(host), version=0)
        return engine

    def complete(prompts, dtype, sampling, *layers):
        key_data = np.asarray(jax.random.key_data(jax.random.key(0)))
        engine = engine_of(dtype, *layers)
        engine.submit_requests(
            [
                DecodeRequest(
                    request_id=str(i),
                    token_ids=prompt,
                    prompt_id=i,
                    epoch=0,
                    samples=(0,),
                    max_new_tokens=NEW_TOKENS,
                    key_data=key_data,
                    sampling=sampling,
                )
                for i, prompt in enumerate(prompts)
            ]
        )
        rows = {int(row.request_id): row for row in run_to_end(engine)}
        return [rows[i] for i in range(len(prompts))]

    return complete


@pytest.fixture(scope="module")
def learner_logprobs(smollm2, with_layers):
    """float32 logprobs of completions, one after the other, as the learner takes them."""
    _, tokenizer = smollm2

    def of(prompts, rows, dtype, *layers):
        model = with_layers(*layers)
        ids = [np.concatenate([p, row.token_ids]) for p, row in zip(prompts, rows, strict=True)]
        longest = max(map(len, ids))
        # What follows the end is not looked at.
        ids_BT = np.stack([np.pad(one, (0, longest - len(one))) for one in ids])
        columns = tokenizer.vocab_size
        found = learner_pass(
            model.params, ids_BT, config=model.config, columns=columns, dtype=dtype
        )
        return np.concatenate(
            [
                logprobs[len(prompt) - 1 : len(one) - 1]
                for logprobs, prompt, one in zip(np.asarray(found), prompts, ids, strict=True)
            ]
        )

    return of


@functools.partial(jax.jit, static_argnames=("config", "columns", "dtype"))
def learner_pass(params, ids_BT, *, config, columns, dtype):
    """float32 logprob of each id after those before it, [B, T - 1], by one forward pass."""
    position_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    attend = packed_attend(jnp.ones_like(ids_BT), operand_dtype=dtype)
    hidden, _ = forward(params, config, ids_BT, position_BT, attend, compute_dtype=dtype)
    scores = logits(hidden, head_weight(params))[:, :-1, :columns]
    chosen = jnp.take_along_axis(scores, ids_BT[:, 1:, None], axis=2)[..., 0]
    return chosen - jax.nn.logsumexp(scores, axis=2)


def test_greedy_equals_transformers_token_for_token(smollm2, prompts, completions, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the test extra: torch")
    import transformers

    model, tokenizer = smollm2
    save_model(tmp_path / "m", model.config, to_named(model.params, model.config), tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    theirs.eval()
    rows = completions(prompts, F32, SamplingSettings(temperature=0.0))
    for prompt, row in zip(prompts, rows, strict=True):
        whole = torch.from_numpy(np.concatenate([prompt, row.token_ids])[None].astype(np.int64))
        with torch.no_grad():
            best = theirs(whole).logits[0].argmax(axis=1).numpy()
        # Each token is the likeliest after those before it, as their greedy search takes it.
        np.testing.assert_array_equal(row.token_ids, best[len(prompt) - 1 : -1])
        ended = row.token_ids[-1] in tokenizer.stop_ids
        assert len(row.token_ids) == NEW_TOKENS or ended


def test_logprobs_are_those_of_the_learner(prompts, completions, learner_logprobs):
    rows = completions(prompts, F32, SamplingSettings())
    expected = learner_logprobs(prompts, rows, F32)
    found = np.concatenate([row.logprobs for row in rows])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_bf16_logprobs_differ_no_more_than_two_bf16_passes_do(
    prompts, completions, learner_logprobs
):
    """The noise is that of the learner's own bfloat16 pass against its float32 pass."""
    prompts, layers = prompts[:4], 8
    rows = completions(prompts, BF16, SamplingSettings(), layers)
    exact = learner_logprobs(prompts, rows, F32, layers)
    gap = np.concatenate([row.logprobs for row in rows]) - exact
    noise = learner_logprobs(prompts, rows, BF16, layers) - exact
    assert np.abs(gap).mean() < 1.5 * np.abs(noise).mean()
    assert abs(gap.mean()) < np.abs(noise).mean(), "an offset is no rounding"
