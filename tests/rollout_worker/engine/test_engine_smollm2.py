"""The engine beside transformers and beside the learner's forward pass, on a real model."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.files.checkpoint import load_model, save_model, to_named
from models.tokenizer import load_tokenizer
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
NEW_TOKENS = 64
F32 = jnp.dtype("float32")


@pytest.fixture(scope="module")
def smollm2():
    return load_model(str(SMOLLM2)), load_tokenizer(str(SMOLLM2))


@pytest.fixture(scope="module")
def prompts(smollm2):
    _, tokenizer = smollm2
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    return [np.asarray(tokenizer.encode_chat(chat), np.int32) for chat in chats]


def complete(smollm2, prompts, dtype, sampling, new_tokens=NEW_TOKENS, slots=6):
    """Completions of every prompt; fewer slots than prompts, so that slots are taken over."""
    model, tokenizer = smollm2
    layout = Layout(model.config, make_mesh(jax.devices()[:1], 1, 1), np.dtype(dtype))
    spec = DecodeSpec(
        layout=layout,
        valid_vocab=tokenizer.vocab_size,
        compute_dtype=dtype,
        attention_dtype=dtype,
        attention_impl="xla",
        slots=slots,
        segment_tokens=16,
        wide_cache=True,
    )
    limits = EngineLimits(max_prompt_tokens=64, max_new_tokens=new_tokens, cache_tokens=128)
    stops = tuple(tokenizer.stop_ids)
    engine = Engine(spec, limits, loop="while", stop_ids=stops, clock=PhaseClock())
    host = jax.tree.map(np.asarray, unstack_layers(model.params))
    engine.swap_policy(layout.to_inference(host), version=0)
    key_data = np.asarray(jax.random.key_data(jax.random.key(0)))
    engine.submit_requests(
        [
            DecodeRequest(
                request_id=str(i),
                token_ids=prompt,
                prompt_id=i,
                epoch=0,
                samples=(0,),
                max_new_tokens=new_tokens,
                key_data=key_data,
                sampling=sampling,
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    rows = {int(row.request_id): row for row in run_to_end(engine)}
    return [rows[i] for i in range(len(prompts))]


def learner_logprobs(smollm2, prompt, completion, dtype):
    """float32 logprobs of a completion by one forward pass, as the learner takes it."""
    model, tokenizer = smollm2
    ids_BT = jnp.asarray(np.concatenate([prompt, completion]))[None]
    position_BT = jnp.arange(ids_BT.shape[1])[None]
    attend = packed_attend(jnp.ones_like(ids_BT), operand_dtype=dtype)
    hidden, _ = forward(
        model.params, model.config, ids_BT, position_BT, attend, compute_dtype=dtype
    )
    scores = logits(hidden, head_weight(model.params))[0, len(prompt) - 1 : -1]
    scores = scores[:, : tokenizer.vocab_size]
    chosen = jnp.take_along_axis(scores, jnp.asarray(completion)[:, None], axis=1)[:, 0]
    return np.asarray(chosen - jax.nn.logsumexp(scores, axis=1))


def test_greedy_equals_transformers_token_for_token(smollm2, prompts, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the test extra: torch")
    import transformers

    model, tokenizer = smollm2
    save_model(tmp_path / "m", model.config, to_named(model.params, model.config), tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    theirs.eval()
    rows = complete(smollm2, prompts, F32, SamplingSettings(temperature=0.0))
    for prompt, row in zip(prompts, rows, strict=True):
        whole = torch.from_numpy(np.concatenate([prompt, row.token_ids])[None].astype(np.int64))
        with torch.no_grad():
            best = theirs(whole).logits[0].argmax(axis=1).numpy()
        # Each token is the likeliest after those before it, as their greedy search takes it.
        np.testing.assert_array_equal(row.token_ids, best[len(prompt) - 1 : -1])
        ended = row.token_ids[-1] in tokenizer.stop_ids
        assert len(row.token_ids) == NEW_TOKENS or ended


def test_logprobs_are_those_of_the_learner(smollm2, prompts):
    rows = complete(smollm2, prompts, F32, SamplingSettings(), new_tokens=32)
    for prompt, row in zip(prompts, rows, strict=True):
        expected = learner_logprobs(smollm2, prompt, row.token_ids, F32)
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


def test_bf16_logprobs_differ_no_more_than_two_bf16_passes_do(smollm2, prompts):
    """The noise is that of the learner's own bfloat16 pass against its float32 pass."""
    bf16 = jnp.dtype("bfloat16")
    rows = complete(smollm2, prompts[:4], bf16, SamplingSettings(), new_tokens=32)
    gap, noise = [], []
    for prompt, row in zip(prompts, rows, strict=False):
        exact = learner_logprobs(smollm2, prompt, row.token_ids, F32)
        gap.append(row.logprobs - exact)
        noise.append(learner_logprobs(smollm2, prompt, row.token_ids, bf16) - exact)
    gap, noise = np.concatenate(gap), np.concatenate(noise)
    assert np.abs(gap).mean() < 1.5 * np.abs(noise).mean()
    assert abs(gap.mean()) < np.abs(noise).mean(), "an offset is no rounding"
