"""Episodes whose keys and values stay in the engine between turns, against a prefill of each turn.

The reference is literal: the same engine without entries to park in, which prefills the whole
history of every turn, and one plain pass of the model over the sequence for the logprobs.
"""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.engine.decode_request import OnSwap, SamplingSettings
from rollout_worker.engine.lane import Parking, Row
from rollout_worker.engine.slots import NOT_PARKED
from services.wire.messages import FinishReason
from tests.rollout_worker.engine.engines import (
    BF16,
    NEW_TOKENS,
    PROMPT_TOKENS,
    assert_same_rows,
    chosen,
    full_logprobs,
    key_data,
    make_engine,
    make_request,
    policy,
    swap,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs_compiled_once")]

SEQUENCE = PROMPT_TOKENS + NEW_TOKENS


@dataclasses.dataclass(frozen=True)
class Script:
    """An episode: its prompt, and what its environment answers whatever is said."""

    name: str
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    samples: int = 1
    turn_tokens: int = 4
    temperature: float = 1.0
    delay: int = 0
    """Turns of the engine that the environment takes."""
    aborted_at: int | None = None
    """Turn of the engine, counted from the beginning."""


class Game:
    """Plays episodes on an engine: a first request for all samples, then one for each turn."""

    def __init__(self, engine, scripts, swaps=()):
        self.engine, self.swaps = engine, swaps
        self.scripts = {script.name: script for script in scripts}
        self.rows = {}
        """By episode, sample and turn."""
        self.prompts = {}
        """Token ids that each was drawn after."""
        self.aborted = set()
        self._due = []
        """(turn of the engine, request)."""
        self._gone = set()

    def play(self):
        """Plays all to their ends; returns itself."""
        first = [self._request(script, None, 0, script.prompt) for script in self.scripts.values()]
        self._due = [(0, request) for request in first]
        turn = 0
        while self._due or self.engine.pending:
            self._abort(turn)
            if turn in self.swaps:
                swap(self.engine, policy(), self.engine.version + 1)
                assert self.engine.parked == 0
            now = [request for when, request in self._due if when <= turn]
            self._due = [(when, request) for when, request in self._due if when > turn]
            self.engine.submit_requests(now)
            for row in self.engine.step():
                self._add(turn, row)
            turn += 1
        return self

    def whole(self):
        """Rows of the episodes that were not aborted."""
        return {key: row for key, row in self.rows.items() if key[0] not in self._gone}

    def _abort(self, turn):
        for name, script in self.scripts.items():
            if script.aborted_at == turn:
                self._gone.add(name)
                self._due = [one for one in self._due if one[1].episode != name]
                for sample in range(script.samples):
                    for number in range(len(script.answers) + 1):
                        self.engine.abort_request(f"{name}/{sample}.{number}")
                self.engine.end_episode(name)

    def _add(self, turn, row):
        name, rest = row.request_id.split("/")
        number, script = int(rest.split(".")[1]), self.scripts[name]
        if row.finish_reason is FinishReason.ABORTED:
            assert name in self._gone
            return
        if name in self._gone:
            return
        key = (name, row.sample_index, number)
        self.rows[key] = row
        before = self.prompts[key] if number else np.array(script.prompt, np.int32)
        self.prompts[key] = before
        if number < len(script.answers):
            history = np.concatenate([before, row.token_ids, script.answers[number]])
            history = history.astype(np.int32)
            if len(history) + script.turn_tokens <= SEQUENCE:
                self.prompts[name, row.sample_index, number + 1] = history
                request = self._request(script, row.sample_index, number + 1, history)
                self._due.append((turn + 1 + script.delay, request))

    def _request(self, script, sample, number, tokens):
        samples = tuple(range(script.samples)) if sample is None else (sample,)
        return make_request(
            tokens,
            prompt_id=int.from_bytes(script.name.encode()) % 1000,
            samples_=samples,
            request_id=f"{script.name}/{samples[0]}.{number}",
            max_new_tokens=script.turn_tokens,
            sampling=SamplingSettings(temperature=script.temperature),
            key_data=key_data(number),
            episode=script.name,
        )


def engine_with(parked, **how):
    return make_engine(parked=parked, goes_on=True, **how)


def scripts_of(seed, count=6, **changes):
    """Episodes of one to four turns; some sequences reach the last column of the cache."""
    rng = np.random.default_rng(seed)
    draw = lambda n: tuple(rng.integers(10, 60, n).tolist())
    return [
        Script(
            name=chr(97 + place),
            prompt=draw(rng.integers(1, 24)),
            answers=tuple(draw(rng.integers(0, 7)) for _ in range(rng.integers(0, 5))),
            samples=int(rng.integers(1, 4)),
            turn_tokens=int(rng.integers(1, 8)),
            temperature=float(rng.choice([0.0, 1.0])),
            delay=int(rng.integers(0, 3)),
            **changes,
        )
        for place in range(count)
    ]


@pytest.fixture(scope="module")
def expected():
    """Rows of all turns, each prefilled from nothing."""
    return Game(engine_with(0), scripts_of(1)).play().rows


def test_logprobs_are_those_of_one_pass_over_the_whole_sequence():
    game = Game(engine_with(32), scripts_of(1)).play()
    assert game.engine.counts.reused_tokens > 100, "the test needs turns that were parked"
    for key, row in game.rows.items():
        logprobs_TV = full_logprobs(policy(), game.prompts[key], row.token_ids)
        if game.scripts[key[0]].temperature:
            expected = chosen(logprobs_TV, row.token_ids)
        else:
            expected = logprobs_TV.max(axis=1)
        # float32 sums of another order; the logits reach 40.
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        dict(parked=1),
        dict(parked=3),
        dict(parked=32),
        dict(parked=32, slots=1, prefixes=1),
        dict(parked=6, slots=2, segment_tokens=16),
        dict(parked=32, loop="python"),
        dict(parked=32, prefill_tokens=8),
        dict(parked=4, data=4, slots=2),
        dict(parked=32, tensor=2),
        dict(parked=8, tensor=2, attention_impl="pallas_interpret"),
    ],
    ids=lambda how: "-".join(f"{name}={value}" for name, value in how.items()),
)
def test_turns_draw_the_same_whether_parked_or_prefilled(expected, how):
    game = Game(engine_with(**how), scripts_of(1)).play()
    # The same bound as between any two ways to decode: keys of a token step and of a prefill
    # differ by the order of float32 sums.
    assert_same_rows(game.rows, expected)
    # Where rows in slots and in the queue need all entries, none is left for one that waits.
    assert game.engine.counts.reused_tokens > 0 or how["parked"] < 3
    for name in game.scripts:
        game.engine.end_episode(name)
    assert game.engine.parked == 0


def test_a_turn_prefills_its_new_tokens_and_the_last_one_drawn():
    script = Script("a", tuple(range(10, 30)), ((11, 12, 13), (), (14,)), turn_tokens=5)
    engine = engine_with(1)
    game = Game(engine, [script]).play()
    lengths = [len(row.token_ids) for row in game.rows.values()]
    # Of a prompt, all but the last token; of a next turn that is the last drawn, then the answer.
    assert engine.counts.prefilled_tokens == 19 + 3 + 0 + 1
    assert len(lengths) == 4
    assert engine.counts.reused_tokens == sum(
        len(game.prompts["a", 0, turn]) - 1 - new for turn, new in ((1, 3), (2, 0), (3, 1))
    )


def test_an_engine_without_entries_prefills_every_turn():
    engine = engine_with(0)
    game = Game(engine, scripts_of(1)).play()
    first = {(key[0], 0): len(game.scripts[key[0]].prompt) - 1 for key in game.rows}
    later = [len(prompt) - 1 for key, prompt in game.prompts.items() if key[2]]
    assert engine.counts.prefilled_tokens == sum(first.values()) + sum(later)
    assert (engine.counts.reused_tokens, engine.parked, engine.parked_bytes) == (0, 0, 0)


def test_the_oldest_episode_gives_way():
    engine = engine_with(2)
    names = ["a", "b", "c"]
    prompts = {name: np.arange(10 + i, 30 + i, dtype=np.int32) for i, name in enumerate(names)}
    turn = lambda name, number, tokens: make_request(
        tokens, request_id=f"{name}{number}", samples=1, max_new_tokens=3, episode=name
    )
    history = {}
    for name in names:
        engine.submit_requests([turn(name, 0, prompts[name])])
        (row,) = [row for _ in range(9) if engine.pending for row in engine.step()]
        history[name] = np.concatenate([prompts[name], row.token_ids])
    assert engine.parked == 2
    reused = {}
    for name in ("b", "c", "a"):
        before = engine.counts.reused_tokens
        engine.submit_requests([turn(name, 1, history[name])])
        while engine.pending:
            engine.step()
        reused[name] = engine.counts.reused_tokens - before
    assert reused == {name: len(history[name]) - 1 if name != "a" else 0 for name in names}


def test_tokens_that_the_next_prompt_does_not_share_are_prefilled():
    """As where a template leaves out a part of the history."""
    engine, fresh = engine_with(1), engine_with(0)
    tokens = np.arange(10, 40, dtype=np.int32)
    first = make_request(tokens, request_id="0", samples=1, episode="a")
    other = np.concatenate([tokens[:20], tokens[25:]])
    second = make_request(other, request_id="1", samples=1, episode="a")
    found = []
    for one in (engine, fresh):
        rows = {}
        for request in (first, second):
            one.submit_requests([request])
            while one.pending:
                rows |= {(row.request_id, 0): row for row in one.step()}
        found.append(rows)
    assert engine.counts.reused_tokens == 20
    assert_same_rows(*found)


def test_a_swap_drops_what_the_older_policy_computed():
    engine = engine_with(4)
    script = Script("a", tuple(range(10, 30)), (), turn_tokens=6)
    row = Game(engine, [script]).play().rows["a", 0, 0]
    assert engine.parked == 1
    swap(engine, policy(4.4), 1)
    assert engine.parked == 0
    history = np.concatenate([script.prompt, row.token_ids, [11, 12]]).astype(np.int32)
    engine.submit_requests([make_request(history, samples=1, episode="a")])
    rows = [row for _ in range(20) if engine.pending for row in engine.step()]
    (after,) = rows
    scores = chosen(full_logprobs(policy(4.4), history, after.token_ids), after.token_ids)
    np.testing.assert_allclose(after.logprobs, scores, atol=1e-4)
    assert engine.counts.reused_tokens == 0


@pytest.mark.parametrize("on_swap", OnSwap)
def test_swaps_between_turns_do_not_show_with_equal_weights(expected, on_swap):
    game = Game(engine_with(8, on_swap=on_swap), scripts_of(1), swaps=(2, 5, 9)).play()
    assert_same_rows(game.rows, expected)


def test_an_abort_and_an_end_free_the_entry():
    engine = engine_with(2)
    script = Script("a", tuple(range(10, 30)), (), samples=2, turn_tokens=3)
    game = Game(engine, [script]).play()
    assert engine.parked == 2
    assert engine.parked_bytes == 2 * 2 * 2 * 2 * (SEQUENCE - 2) * 8 * 4
    history = np.concatenate([script.prompt, game.rows["a", 0, 0].token_ids]).astype(np.int32)
    engine.submit_requests([make_request(history, samples=1, request_id="next", episode="a")])
    engine.abort_request("next")
    assert engine.parked == 1, "sample 1 has not been aborted"
    engine.end_episode("a")
    assert engine.parked == 0
    engine.end_episode("unknown")
    list(engine.step())
    # Both entries may be used again.
    Game(engine, [dataclasses.replace(script, name="b")]).play()
    assert engine.parked == 2


def test_requests_without_an_episode_are_not_parked():
    engine = engine_with(4)
    engine.submit_requests([make_request(np.arange(10, 30))])
    while engine.pending:
        engine.step()
    assert engine.parked == 0


def test_bf16_stays_within_its_own_noise():
    """A draw may differ there, so that turns are compared with a pass over their own tokens."""
    how = dict(dtype=BF16, attention=BF16, wide_cache=True)
    scripts = [dataclasses.replace(one, temperature=0.0) for one in scripts_of(1)]
    parked = Game(engine_with(32, **how), scripts).play()
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf.astype(BF16), np.float32), policy())
    gaps = []
    for key, row in parked.rows.items():
        best_T = full_logprobs(rounded, parked.prompts[key], row.token_ids).max(axis=1)
        gaps.append(np.abs(row.logprobs - best_T))
    # The bound of test_engine: that of bfloat16 activations, parked or not.
    assert np.concatenate(gaps).max() < 1.0 and np.concatenate(gaps).mean() < 0.1


@pytest.fixture(scope="module")
def engines():
    """By entries; kept from example to example, as a worker keeps its engine."""
    return {parked: engine_with(parked) for parked in (0, 1, 2, 5, 40)}


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    parked=st.sampled_from([1, 2, 5, 40]),
    aborts=st.lists(st.one_of(st.none(), st.integers(0, 12)), min_size=7, max_size=7),
    swaps=st.sets(st.integers(0, 15), max_size=3),
)
def test_random_episodes_with_aborts_swaps_and_evictions(engines, seed, parked, aborts, swaps):
    scripts = [
        dataclasses.replace(script, aborted_at=at)
        for script, at in zip(scripts_of(seed, count=7), aborts, strict=True)
    ]
    kept = Game(engines[parked], scripts, swaps).play()
    anew = Game(engines[0], [dataclasses.replace(one, aborted_at=None) for one in scripts]).play()
    whole = kept.whole()
    assert whole.keys() == {key for key in anew.rows if key[0] not in kept._gone}
    assert_same_rows(whole, {key: anew.rows[key] for key in whole})
    assert engines[parked].parked <= parked
    for script in scripts:
        engines[parked].end_episode(script.name)
    assert engines[parked].parked == 0


def row_of(sample, entry):
    request = make_request([10, 11], samples=1, episode="a")
    return Row(request, sample, 0, token_ids=[np.array([12, 13])], drawn=2, parking=entry)


def test_entries_are_given_to_queued_rows_before_anything_is_given_up():
    parking = Parking([7, 8])
    assert [parking.reserve() for _ in range(3)] == [7, 8, NOT_PARKED]
    parking.park(row_of(0, 7))
    parking.park(row_of(1, NOT_PARKED))
    assert len(parking) == 1 and ("a", 0) in parking and ("a", 1) not in parking
    assert parking.reserve() == 7, "the one that is parked gives way"
    assert len(parking) == 0


def test_a_later_end_of_the_same_sample_replaces_the_earlier():
    parking = Parking([7, 8])
    for entry in (parking.reserve(), parking.reserve()):
        parking.park(row_of(0, entry))
    assert len(parking) == 1
    assert parking.reserve() == 7
