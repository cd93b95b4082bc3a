"""What a row draws and the logprobs beside it, bit for bit, whatever else the engine decodes."""

import dataclasses

import numpy as np
import pytest

from rollout_worker.engine.engine_limits import geometry_of
from tests.rollout_worker.engine.engines import BF16, F32, make_request, run, shared_engine

pytestmark = pytest.mark.slow

PROMPT_TOKENS, NEW_TOKENS = 300, 40


@pytest.fixture(params=[F32, BF16], ids=["float32", "bfloat16"], scope="module")
def engine(request):
    """Of a worker on a CPU, whose cache would come in two widths."""
    return shared_engine(
        slots=6,
        dtype=request.param,
        wide_cache=True,
        max_prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS,
        cache_tokens=500,
        prefill_tokens=64,
        invariant=True,
    )


@pytest.fixture(scope="module")
def requests():
    """Prompts of one and of several chunks; some rows fit the narrow cache, others do not."""
    rng = np.random.default_rng(0)
    lengths = [7, 290, 33, 1, 300, 128, 64, 200, 250, 15]
    return [
        make_request(
            rng.integers(10, 60, n), i, samples=3, stop_ids=(), max_new_tokens=int(5 + 3 * i)
        )
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def expected(engine, requests):
    return run(engine, requests)


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for key, row in actual.items():
        np.testing.assert_array_equal(row.token_ids, expected[key].token_ids)
        np.testing.assert_array_equal(
            row.logprobs.view(np.int32), expected[key].logprobs.view(np.int32)
        )


def in_lots(engine, requests, size):
    """Submits so many requests at each turn, while those before them are decoded."""
    rows, waiting = {}, list(requests)
    while waiting or engine.pending:
        engine.submit_requests(waiting[:size])
        waiting = waiting[size:]
        rows |= {(row.request_id, row.sample_index): row for row in engine.step()}
    return rows


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_requests_does_not_change_a_bit(engine, requests, expected, seed):
    order = np.random.default_rng(seed).permutation(len(requests))
    assert_same_bits(run(engine, [requests[i] for i in order]), expected)


@pytest.mark.parametrize("size", [1, 3])
def test_rows_that_come_while_others_are_decoded_do_not_change_a_bit(
    engine, requests, expected, size
):
    assert_same_bits(in_lots(engine, requests[::-1], size), expected)


def test_a_row_has_the_same_bits_alone_as_in_company(engine, requests, expected):
    alone = {}
    for request in requests:
        alone |= run(engine, [request])
    assert_same_bits(alone, expected)


def test_a_cache_that_is_not_to_be_invariant_comes_in_several_widths(engine):
    limits = dataclasses.replace(engine.limits, invariant=False)
    assert engine.programs.geometry.widths == (500,)
    assert geometry_of(engine.spec, limits).widths == (256, 500)
