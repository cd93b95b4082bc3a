"""The engine: against a full forward pass, and against itself in other batches and layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rollout_worker.engine.slots as slots_module
from rollout_worker.engine.decode_request import SamplingSettings
from rollout_worker.engine.kv_cache import check_geometry, doubling_sizes
from rollout_worker.engine.program_cache import UnplannedCompilation
from rollout_worker.engine.sampling import row_keys
from services.wire.messages import FinishReason
from tests.rollout_worker.engine import engines
from tests.rollout_worker.engine.engines import (
    BF16,
    F32,
    NEW_TOKENS,
    PROMPT_TOKENS,
    STOP_IDS,
    assert_same_rows,
    chosen,
    full_logprobs,
    key_data,
    make_engine,
    make_request,
    make_requests,
    policy,
    run,
    run_to_end,
    shared_engine,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs_compiled_once")]


@pytest.fixture(scope="module")
def decoded():
    """Rows that the others are compared with: more of them than slots."""
    return run(shared_engine(), make_requests())


def prompt_of(row):
    return make_requests()[int(row.request_id)].token_ids


def test_logprobs_equal_those_of_a_full_forward_pass(decoded):
    for row in decoded.values():
        expected = chosen(full_logprobs(policy(), prompt_of(row), row.token_ids), row.token_ids)
        # float32 sums of another order; the logits reach 40.
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


def test_rows_end_with_their_first_stop_token_and_not_before(decoded):
    reasons = {row.finish_reason for row in decoded.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}, "the test needs both"
    for row in decoded.values():
        assert not np.isin(row.token_ids[:-1], STOP_IDS).any()
        stopped = row.finish_reason is FinishReason.STOP
        assert np.isin(row.token_ids[-1], STOP_IDS) == stopped
        assert stopped or len(row.token_ids) == NEW_TOKENS
        assert (row.versions == 0).all()


@pytest.mark.parametrize(
    "how",
    [
        dict(slots=1),
        dict(slots=32, segment_tokens=64),
        dict(loop="python"),
        dict(prefill_tokens=8, prefixes=1),
        dict(data=4, slots=2),
        dict(tensor=4),
        dict(data=2, tensor=2),
        dict(attention_impl="pallas_interpret", data=2, tensor=2),
    ],
    ids=lambda how: "-".join(f"{name}={value}" for name, value in how.items()),
)
def test_draws_do_not_depend_on_how_they_are_decoded(decoded, how):
    assert_same_rows(run(make_engine(**how), make_requests()), decoded)


def test_draws_do_not_depend_on_the_width_of_the_cache(decoded, monkeypatch):
    monkeypatch.setattr("rollout_worker.engine.engine_limits.NARROWEST", 8)
    engine = make_engine()
    assert engine.programs.geometry.widths == (8, 13, 26, 52)
    # First rows that need little, then those that need all of it, then little again.
    short = [make_requests()[1]]
    run(engine, short)
    assert_same_rows(run(engine, make_requests()), decoded)
    before = engine.resizes
    assert before > 0
    run(engine, short)
    assert engine.resizes > before, "a cache that is too wide is narrowed"


def test_a_row_alone_equals_the_row_among_others(decoded):
    for request in make_requests()[:3]:
        one = dataclasses.replace(request, samples=(2,))
        alone = run(shared_engine(), [one])
        assert_same_rows(alone, {key: decoded[key] for key in alone})


def test_the_order_of_the_requests_does_not_matter(decoded):
    assert_same_rows(run(shared_engine(), make_requests()[::-1]), decoded)


def test_requests_that_come_later_do_not_disturb_those_before(decoded):
    engine = shared_engine()
    first, second = make_requests()[:2], make_requests()[2:]
    rows = {}
    engine.submit_requests(first)
    for row in engine.step():
        rows[row.request_id, row.sample_index] = row
    engine.submit_requests(second)
    for row in run_to_end(engine):
        rows[row.request_id, row.sample_index] = row
    assert_same_rows(rows, decoded)


def test_no_slot_waits_while_a_row_does():
    engine = make_engine(segment_tokens=16)
    run(engine, make_requests())
    tokens, steps = engine.counts.tokens, engine.counts.token_steps
    # Only after the last row has entered may slots be idle, which is no longer than one row lasts.
    assert steps <= -(-(tokens - NEW_TOKENS) // 4) + NEW_TOKENS


def test_a_prompt_is_prefilled_once_for_all_its_completions():
    engine = make_engine()
    run(engine, [make_request(np.arange(10, 40), samples=24)])
    assert (engine.counts.prompts, engine.counts.prefill_calls) == (1, 1)


def test_temperature_zero_takes_the_most_likely_token():
    greedy = SamplingSettings(temperature=0.0)
    requests = [dataclasses.replace(one, sampling=greedy, samples=(0,)) for one in make_requests()]
    for row in run(shared_engine(), requests).values():
        logprobs_TV = full_logprobs(policy(), prompt_of(row), row.token_ids)
        np.testing.assert_allclose(row.logprobs, logprobs_TV.max(axis=1), atol=1e-4)


def test_requests_with_other_settings_share_a_batch():
    base = make_requests()[0]
    settings = [
        SamplingSettings(temperature=0.0),
        SamplingSettings(temperature=1.7),
        SamplingSettings(top_k=1),
        SamplingSettings(top_p=0.5),
        SamplingSettings(min_p=0.3),
    ]
    requests = [
        dataclasses.replace(base, request_id=str(i), sampling=one) for i, one in enumerate(settings)
    ]
    mixed = run(shared_engine(), requests)
    for request in requests:
        alone = run(shared_engine(), [request])
        assert_same_rows(alone, {key: mixed[key] for key in alone})
    greedy = [mixed["0", sample].token_ids for sample in range(4)]
    for sample in range(4):
        np.testing.assert_array_equal(mixed["2", sample].token_ids, greedy[sample])
        assert (mixed["2", sample].logprobs == 0).all(), "one id left has probability 1"


def test_stop_ids_and_lengths_are_each_requests_own():
    base = dataclasses.replace(make_requests()[0], stop_ids=())
    free = run(shared_engine(), [base])
    assert {len(row.token_ids) for row in free.values()} == {NEW_TOKENS}
    first = int(free["0", 0].token_ids[0])
    shorter = dataclasses.replace(base, request_id="1", max_new_tokens=3)
    stopping = dataclasses.replace(base, request_id="2", stop_ids=(first,))
    rows = run(shared_engine(), [base, shorter, stopping])
    for sample in range(4):
        whole = free["0", sample].token_ids
        np.testing.assert_array_equal(rows["1", sample].token_ids, whole[:3])
        places = np.flatnonzero(whole == first)
        end = places[0] + 1 if len(places) else len(whole)
        np.testing.assert_array_equal(rows["2", sample].token_ids, whole[:end])


def test_ids_beyond_the_vocabulary_are_never_drawn():
    hot = SamplingSettings(temperature=50.0)
    request = dataclasses.replace(make_requests()[0], sampling=hot, samples=tuple(range(64)))
    rows = run(shared_engine(), [request]).values()
    drawn = np.concatenate([row.token_ids for row in rows])
    assert drawn.max() < engines.VALID_VOCAB and len(set(drawn.tolist())) > 40


@pytest.mark.parametrize("impl", ["xla", "pallas_interpret"])
def test_bf16_stays_within_its_own_noise(impl):
    """Against float32 arithmetic over the same bfloat16 weights."""
    rounded = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf, BF16), np.float32), policy())
    engine = make_engine(dtype=BF16, attention=BF16, attention_impl=impl)
    gaps = []
    for row in run(engine, make_requests()).values():
        expected = full_logprobs(rounded, prompt_of(row), row.token_ids)
        gaps.append(row.logprobs - chosen(expected, row.token_ids))
    gap = np.abs(np.concatenate(gaps))
    # Logits of 20 have steps of 2**-4 in bfloat16 activations; the head itself sums in float32.
    assert gap.max() < 1.0 and gap.mean() < 0.1


def test_the_second_pass_over_the_same_requests_compiles_nothing():
    engine = make_engine()
    run(engine, make_requests())
    compiled = len(engine.compilations)
    run(engine, make_requests())
    assert len(engine.compilations) == compiled
    assert [one.because for one in engine.compilations] == ["first use"] * compiled


def test_a_compilation_beyond_the_budget_is_refused_with_the_size_that_changed():
    engine = make_engine(prefill_tokens=64, max_prompt_tokens=PROMPT_TOKENS, compile_budget=3)
    run(engine, [make_request(range(10, 40))])
    engine = make_engine(max_prompt_tokens=200, cache_tokens=212, compile_budget=3)
    run(engine, [make_request(range(10, 40))])
    strict = make_engine(
        max_prompt_tokens=200, cache_tokens=212, compile_budget=3, over_budget="error"
    )
    run(strict, [make_request(range(10, 40))])
    with pytest.raises(UnplannedCompilation, match=r"chunk 49 -> 199.*compile_budget=3"):
        run(strict, [make_request(np.full(150, 20))])


@pytest.mark.parametrize(
    "request_, message",
    [
        (
            make_request(np.full(41, 10)),
            "41 prompt tokens, but the engine was built for at most 40",
        ),
        (make_request([], 0), "nothing to generate"),
        (make_request([10], max_new_tokens=0), "nothing to generate"),
        (make_request([10], max_new_tokens=13), "13 max_new_tokens"),
        (make_request([10], stop_ids=tuple(range(9))), "9 stop ids"),
        (make_request([64]), "token ids must be from 0 to 63, got 64"),
        (make_request([-1]), "token ids must be from 0 to 63, got -1"),
        (make_request([10], stop_set=1), "stop_set=1, but the engine has 1"),
        (make_request([10], samples=0), "samples is empty"),
        (make_request([10], samples_=(0, 0)), "samples must differ"),
        (make_request([10], samples_=(0.5,)), r"samples\[0\] must be a whole number"),
        (make_request([10], prompt_id=2**31), "prompt_id must be a whole number below"),
        (make_request([10], epoch=-1), "epoch must be a whole number below"),
        (make_request([10], max_new_tokens=2.5), "max_new_tokens must be a whole number"),
        (make_request([10], stop_ids=(2**31,)), r"stop_ids\[0\] must be a whole number"),
        (make_request([10], token_ids=np.array([1.5])), "one-dimensional array of integers"),
        (make_request([10], token_ids=[10]), "one-dimensional array of integers"),
        (make_request([10], token_ids=np.array([[10]])), "one-dimensional array of integers"),
        (make_request([10], key_data=np.zeros(4, np.uint32)), r"key_data must be uint32 \[2\]"),
        (make_request([10], key_data=np.zeros(2, np.int64)), r"key_data must be uint32 \[2\]"),
        (make_request([10], sampling=None), "sampling must be SamplingSettings"),
        (make_request([10], request_id=7), "request_id must be text"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_and_takes_no_other_with_it(request_, message):
    engine = shared_engine()
    with pytest.raises(ValueError, match=message):
        engine.submit_requests([make_requests()[0], request_])
    assert not engine.pending


def test_two_requests_of_one_name_are_refused():
    engine = shared_engine()
    with pytest.raises(ValueError, match="request 0 is being decoded"):
        engine.submit_requests([make_requests()[0], make_requests()[0]])
    assert not engine.pending


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(temperature=-1.0), "temperature must be between"),
        (dict(temperature=float("nan")), "temperature must be between"),
        (dict(top_k=-1), "top_k must be a whole number, at least 0"),
        (dict(top_k=2**31), "top_k must be a whole number"),
        (dict(top_k=1.5), "top_k must be a whole number"),
        (dict(top_p=0.0), "top_p must be at least"),
        (dict(top_p=1e-40), "top_p must be at least"),
        (dict(top_p=1.5), "top_p must be between"),
        (dict(min_p=-0.1), "min_p must be between"),
    ],
)
def test_settings_that_no_distribution_has_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**settings)


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(slots=0), "slots must be a whole number, at least 1"),
        (dict(segment_tokens=0), "segment_tokens must be"),
        (dict(prefill_tokens=0), "prefill_tokens must be"),
        (dict(prefixes=0), "prefixes must be"),
        (dict(stop_ids=-1), "stop_ids must be"),
        (dict(cache_tokens=60.5), "cache_tokens must be"),
        (dict(cache_tokens=51), "need 52 positions, but the KV cache holds 51"),
        (dict(on_swap="finish"), "on_swap must be one of"),
        (dict(over_budget="eror"), "over_budget must be"),
        (dict(loop="foo"), "loop must be while or python"),
        (dict(valid_vocab=65), "valid_vocab=65 must be at most"),
    ],
)
def test_an_engine_that_could_not_work_is_refused_before_anything_is_compiled(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**sizes)


def test_an_engine_is_not_used_after_a_step_that_failed_until_it_is_given_a_policy(
    decoded, monkeypatch
):
    """What the step left undone must not be taken for done."""
    engine = make_engine()
    engine.submit_requests(list(make_requests()))
    monkeypatch.setattr(engine.device, "prefill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="an earlier step or swap failed: call swap"):
        engine.step()
    engines.swap(engine, policy(), 0)
    assert_same_rows(
        {(row.request_id, row.sample_index): row for row in run_to_end(engine)}, decoded
    )


def test_a_cache_is_narrow_again_when_nothing_runs(monkeypatch):
    monkeypatch.setattr("rollout_worker.engine.engine_limits.NARROWEST", 8)
    engine = make_engine()
    run(engine, make_requests())
    resizes, compiled = engine.resizes, len(engine.compilations)
    run(engine, make_requests())
    assert engine.resizes == 2 * resizes > 0
    assert len(engine.compilations) == compiled


@pytest.mark.slow
@pytest.mark.parametrize("prefill_tokens", [256, 512])
def test_bf16_prompts_of_several_chunks_run_on_a_cpu(prefill_tokens):
    """XLA:CPU has no bfloat16 product of some shapes, which only shows when they run."""
    sizes = dict(max_prompt_tokens=600, max_new_tokens=8, cache_tokens=608)
    engine = make_engine(
        dtype=BF16, attention=F32, wide_cache=True, prefill_tokens=prefill_tokens, **sizes
    )
    rows = run(engine, [make_request(np.full(590, 20), max_new_tokens=8)])
    assert len(rows) == 4


def test_a_step_without_a_policy_is_refused():
    engine = make_engine()
    fresh = type(engine)(
        engine.spec,
        engine.limits,
        loop="while",
        stop_ids=(),
        clock=engines.PhaseClock(),
    )
    with pytest.raises(RuntimeError, match="call swap_policy before step"):
        fresh.step()


# Public cases


def test_case_s01_any_stop_id_ends_a_row_and_its_slot_is_free(cases, monkeypatch):
    """The draw is scripted; everything around it is the engine's."""
    case = cases("sampling")["S01"]
    given, expected = case["input"], case["expected"]
    script_RN = jnp.asarray(given["next_tokens_by_row"], jnp.int32)
    logprob_RN = jnp.asarray(given["step_logprobs_by_row"], jnp.float32)
    ids = jnp.arange(len(script_RN))
    keys_R2 = jax.random.key_data(
        row_keys(jax.random.wrap_key_data(jnp.asarray(key_data())), 0 * ids, 1 + 0 * ids, ids)
    )

    def scripted(key_data_B, count_B, logits_BV, sampling, *, valid_vocab):
        row_B = jnp.argmax((key_data_B[:, None] == keys_R2).all(axis=-1), axis=1)
        count_B = jnp.minimum(count_B, script_RN.shape[1] - 1)
        return script_RN[row_B, count_B], logprob_RN[row_B, count_B]

    monkeypatch.setattr(slots_module, "draw_tokens", scripted)
    request = make_request(
        [10],
        samples=len(script_RN),
        stop_ids=tuple(given["eos_ids"]),
        max_new_tokens=given["max_new_tokens"],
    )
    engine = make_engine(slots=len(script_RN), segment_tokens=16)
    rows = run(engine, [request])
    for sample, length in enumerate(expected["lengths"]):
        row = rows["0", sample]
        np.testing.assert_array_equal(row.token_ids, expected["tokens"][sample][:length])
        np.testing.assert_allclose(row.logprobs, expected["logprobs"][sample][:length])
        assert row.finish_reason.value == expected["finish_reason"][sample]
    assert engine.counts.token_steps == expected["decode_steps_run"]
    before = engine.counts.token_steps
    run(engine, [dataclasses.replace(request, samples=(0, 3, 4))])
    steps = engine.counts.token_steps - before
    assert steps == expected["decode_steps_run_if_only_rows_0_3_4"]


def test_case_s02_positions_count_real_tokens_only(cases):
    """No row is padded on the left, so that a short prompt is what it is alone."""
    lengths = np.sum(cases("sampling")["S02"]["input"]["attention_mask"], axis=1)
    greedy = SamplingSettings(temperature=0.0)
    requests = [
        make_request(np.arange(20, 20 + n), i, samples=1, sampling=greedy)
        for i, n in enumerate(lengths)
    ]
    together = run(shared_engine(), requests)
    for request in requests:
        row = together[request.request_id, 0]
        expected = full_logprobs(policy(), request.token_ids, row.token_ids)
        np.testing.assert_allclose(row.logprobs, chosen(expected, row.token_ids), atol=1e-4)


@pytest.mark.parametrize(
    "prompt, new, cache, positions, message",
    [
        (5, 4, 8, 64, "need 9 positions, but the KV cache holds 8"),
        (5, 3, 8, 64, None),
        (32, 0, 64, 64, "nothing to generate"),
        (16, 16, 32, 24, "max_position_embeddings=24"),
    ],
)
def test_case_s05_geometry_is_refused_with_the_numbers(prompt, new, cache, positions, message):
    geometry = dict(
        prompt_tokens=prompt,
        completion_tokens=new,
        cache_tokens=cache,
        max_position_embeddings=positions,
    )
    if message is None:
        check_geometry(**geometry)
        return
    with pytest.raises(ValueError, match=message):
        check_geometry(**geometry)


def test_case_s05_a_cache_that_just_fits_gives_what_a_wide_one_does():
    request = make_request(np.arange(20, 25), max_new_tokens=3, stop_ids=())
    tight = make_engine(max_prompt_tokens=5, max_new_tokens=3, cache_tokens=8)
    assert_same_rows(run(tight, [request]), run(shared_engine(), [request]))


def test_widths_double_up_to_the_longest_sequence():
    assert doubling_sizes(256, 80) == (80,)
    assert doubling_sizes(256, 384) == (384,)
    assert doubling_sizes(256, 1536) == (384, 768, 1536)
