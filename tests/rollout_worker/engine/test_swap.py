"""What a change of policy does to rows in flight, and what an abort does."""

import dataclasses

import jax
import numpy as np
import pytest

from rollout_worker.engine.decode_request import OnSwap, SamplingSettings
from rollout_worker.engine.stop_strings import build_stop_automaton
from services.wire.messages import FinishReason
from tests.rollout_worker.engine.engines import (
    NEW_TOKENS,
    assert_same_rows,
    chosen,
    full_logprobs,
    make_engine,
    make_request,
    make_requests,
    policy,
    run,
    run_to_end,
    swap,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs_compiled_once")]

OLD, NEW = 4.0, 4.4


def engine_with(on_swap, **how):
    return make_engine(on_swap=on_swap, **how)


def run_with_swap(engine, turns=2):
    """All requests, with a swap after some turns: rows by request and sample."""
    engine.submit_requests(list(make_requests()))
    rows = []
    for _ in range(turns):
        rows += engine.step()
    swap(engine, policy(NEW), version=1)
    rows += run_to_end(engine)
    found = {(row.request_id, row.sample_index): row for row in rows}
    assert len(found) == len(rows) == sum(len(request.samples) for request in make_requests())
    return found


@pytest.fixture(scope="module")
def undisturbed():
    """Rows of an engine that never knew another policy, by scale."""
    rows = {OLD: run(make_engine(), make_requests())}
    fresh = make_engine()
    swap(fresh, policy(NEW), version=1)
    return rows | {NEW: run(fresh, make_requests())}


def test_case_s10_new_weights_leave_no_trace_of_the_old(undisturbed):
    used = make_engine()
    run(used, make_requests())
    swap(used, policy(NEW), version=1)
    after = run(used, make_requests())
    assert_same_rows(after, undisturbed[NEW], atol=0)
    assert any(
        not np.array_equal(row.token_ids, undisturbed[OLD][key].token_ids)
        for key, row in after.items()
    ), "the test needs policies that differ"


def test_weights_that_are_not_finite_leave_no_trace_either(undisturbed):
    engine = make_engine(on_swap=OnSwap.RESTART)
    swap(engine, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), policy()), version=0)
    engine.submit_requests(list(make_requests()))
    engine.step()
    swap(engine, policy(NEW), version=1)
    rows = {(row.request_id, row.sample_index): row for row in run_to_end(engine)}
    mended = {key: row for key, row in rows.items() if (row.versions == 1).all()}
    assert len(mended) >= len(rows) - 8, "at most two batches can have ended under NaN"
    assert_same_rows(mended, {key: undisturbed[NEW][key] for key in mended})


def test_finish_ends_rows_under_the_version_they_began_with(undisturbed):
    rows = run_with_swap(engine_with(OnSwap.FINISH))
    versions = {key: set(row.versions.tolist()) for key, row in rows.items()}
    assert {0} in versions.values() and {1} in versions.values(), "the test needs both"
    for key, row in rows.items():
        (version,) = versions[key]
        assert_same_rows({key: row}, {key: undisturbed[(OLD, NEW)[version]][key]})


def test_restart_samples_unfinished_completions_again(undisturbed):
    rows = run_with_swap(engine_with(OnSwap.RESTART))
    versions = {key: set(row.versions.tolist()) for key, row in rows.items()}
    assert {1} in versions.values()
    for key, row in rows.items():
        (version,) = versions[key]
        assert_same_rows({key: row}, {key: undisturbed[(OLD, NEW)[version]][key]})


@pytest.mark.parametrize("how", [dict(), dict(data=2, slots=2), dict(prefill_tokens=8)])
def test_continue_keeps_tokens_and_computes_the_rest_under_the_new_version(undisturbed, how):
    rows = run_with_swap(engine_with(OnSwap.CONTINUE, **how))
    mixed = 0
    for key, row in rows.items():
        prompt = make_requests()[int(row.request_id)].token_ids
        old = row.versions == 0
        assert (np.diff(row.versions) >= 0).all()
        mixed += old.any() and not old.all()
        kept = int(old.sum())
        np.testing.assert_array_equal(row.token_ids[:kept], undisturbed[OLD][key].token_ids[:kept])
        for scale, mine in ((OLD, old), (NEW, ~old)):
            # The new version's logprobs are those of a pass in which it computed everything.
            expected = chosen(full_logprobs(policy(scale), prompt, row.token_ids), row.token_ids)
            np.testing.assert_allclose(row.logprobs[mine], expected[mine], atol=1e-4)
    assert mixed > 1, "the test needs rows of two versions"


def test_continue_draws_the_tokens_that_an_undisturbed_run_would(undisturbed):
    """With equal weights before and after, a swap must not show."""
    engine = engine_with(OnSwap.CONTINUE)
    engine.submit_requests(list(make_requests()))
    rows = []
    for turn in range(6):
        rows += engine.step()
        swap(engine, policy(), version=turn + 1)
    rows += run_to_end(engine)
    found = {(row.request_id, row.sample_index): row for row in rows}
    assert_same_rows(found, undisturbed[OLD])
    assert max(len(set(row.versions.tolist())) for row in rows) > 1


def test_a_swap_while_nothing_runs_keeps_what_waits(undisturbed):
    engine = make_engine()
    engine.submit_requests(list(make_requests()))
    swap(engine, policy(NEW), version=1)
    rows = {(row.request_id, row.sample_index): row for row in run_to_end(engine)}
    assert_same_rows(rows, undisturbed[NEW])


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_an_abort_ends_a_request_and_no_other(undisturbed, turns):
    engine = make_engine()
    engine.submit_requests(list(make_requests()))
    rows = []
    for _ in range(turns):
        rows += engine.step()
    gone = {row.request_id for row in rows}
    victim = next(str(i) for i in range(len(make_requests())) if str(i) not in gone)
    engine.abort_request(victim)
    rows += run_to_end(engine)
    found = {(row.request_id, row.sample_index): row for row in rows}
    assert len(found) == len(rows) == len(undisturbed[OLD])
    others = {key: row for key, row in found.items() if key[0] != victim}
    assert_same_rows(others, {key: undisturbed[OLD][key] for key in others})
    for key, row in found.items():
        if key[0] == victim:
            assert row.finish_reason is FinishReason.ABORTED
            whole = undisturbed[OLD][key].token_ids
            np.testing.assert_array_equal(row.token_ids, whole[: len(row.token_ids)])
            assert len(row.token_ids) < NEW_TOKENS


def test_an_abort_keeps_the_tokens_that_there_are_though_a_swap_follows(undisturbed):
    engine = engine_with(OnSwap.RESTART)
    engine.submit_requests(list(make_requests()))
    engine.step()
    engine.step()
    known = engine.tokens_so_far("0")
    assert max(map(len, known.values())) > 0, "the test needs tokens"
    engine.abort_request("0")
    swap(engine, policy(NEW), version=1)
    rows = [row for row in run_to_end(engine) if row.request_id == "0"]
    assert len(rows) == 4
    for row in rows:
        assert len(row.token_ids) >= len(known.get(row.sample_index, ()))


def test_rows_are_decoded_once_though_a_swap_had_to_be_tried_twice(undisturbed, monkeypatch):
    engine = engine_with(OnSwap.RESTART)
    engine.submit_requests(list(make_requests()))
    rows = engine.step()
    device = engine.device
    monkeypatch.setattr(device, "load_policy", lambda params: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        swap(engine, policy(NEW), version=1)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="an earlier step or swap failed"):
        engine.step()
    swap(engine, policy(NEW), version=1)
    rows += run_to_end(engine)
    found = {(row.request_id, row.sample_index): row for row in rows}
    assert len(found) == len(rows) == len(undisturbed[NEW])


def test_another_models_policy_is_refused_and_changes_nothing(undisturbed):
    engine = make_engine()
    params = engine.spec.layout.to_inference(policy())
    with pytest.raises(ValueError, match="names are not those"):
        engine.swap_policy({"a": params["norm"]["weight"]}, 1)
    wrong = {**params, "norm": {"weight": params["norm"]["weight"][:-1]}}
    with pytest.raises(ValueError, match=r"\['norm'\]\['weight'\] is float32 \[31\]"):
        engine.swap_policy(wrong, 1)
    assert_same_rows(run(engine, make_requests()), undisturbed[OLD])


def test_rows_that_finish_before_a_swap_take_whole_segments():
    """No row may enter, so that none ends a segment early by waiting."""
    engine = engine_with(OnSwap.FINISH, segment_tokens=4, prefixes=4)
    lengths = (2, 5, 7, NEW_TOKENS, 3, 3)
    engine.submit_requests(
        [
            make_request([10 + i], i, samples=1, stop_ids=(), max_new_tokens=length)
            for i, length in enumerate(lengths)
        ]
    )
    engine.step()
    before = engine.counts.segments
    swap(engine, policy(NEW), version=1)
    assert engine.counts.segments - before <= -(-NEW_TOKENS // 4)
    assert engine.pending


def test_an_engine_goes_on_after_an_abort(undisturbed):
    engine = make_engine()
    for request in make_requests():
        engine.submit_requests([request])
        engine.step()
        engine.abort_request(request.request_id)
    list(run_to_end(engine))
    assert_same_rows(run(engine, make_requests()), undisturbed[OLD])


def test_an_abort_of_an_unknown_request_does_nothing():
    engine = make_engine()
    engine.abort_request("unknown")
    assert not engine.pending


def test_a_stop_string_is_found_across_a_swap():
    """The automaton of a row that goes on stands where its tokens left it."""
    token_bytes = [bytes([65 + i % 26]) for i in range(64)]
    greedy = SamplingSettings(temperature=0.0)
    request = dataclasses.replace(make_requests()[0], sampling=greedy, samples=(0,), stop_ids=())
    plain = run(make_engine(), [request])["0", 0].token_ids
    text = b"".join(token_bytes[token] for token in plain)
    stops = build_stop_automaton(token_bytes, [[], [text[3:7].decode()]])
    first = text.find(text[3:7]) + 4
    engine = make_engine(stops=stops, on_swap=OnSwap.CONTINUE, segment_tokens=1, loop="python")
    engine.submit_requests([dataclasses.replace(request, stop_set=1)])
    rows = []
    while engine.pending:
        rows += engine.step()
        swap(engine, policy(), version=engine.version + 1)
    (row,) = rows
    np.testing.assert_array_equal(row.token_ids, plain[:first])
    assert row.finish_reason is FinishReason.STOP
