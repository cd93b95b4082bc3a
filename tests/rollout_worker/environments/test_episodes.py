"""Episodes token for token: what is trained is what was sampled, whatever the environment says."""

import functools
import os
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.files.checkpoint import load_model
from models.load_tokenizer import load_tokenizer
from models.transformer import forward, head_weight, logits, packed_attend
from rollout_worker.config.data_config import DataConfig, SourceConfig
from rollout_worker.config.environment_config import EnvironmentConfig
from rollout_worker.config.rollout_config import DecodeConfig, RolloutConfig
from rollout_worker.engine.decode_request import DecodeRequest, FinishedRow, SamplingSettings
from rollout_worker.environments.environment_pool import (
    Conversation,
    EnvironmentFailed,
    EnvironmentPool,
)
from rollout_worker.environments.episodes import EpisodeGroup, seed_of
from rollout_worker.environments.turn_values import Turn
from rollout_worker.evaluation.idle_share import IdleShare
from rollout_worker.leased_group import LeasedGroup
from rollout_worker.rewards.composition import Composition
from rollout_worker.rewards.reward_values import ValueNames
from rollout_worker.worker_core import WorkerCore
from rollout_worker.worker_records import EngineUse, EvalRequest
from services.process.phase_clock import PhaseClock
from services.trajectories.group_check import check_group
from services.weights.digest import tree_digest
from services.wire.messages import Completion, FinishReason, Lease, WeightManifest
from tests.deadlines import HANG_S
from tests.models.test_assistant_turns import MARKS, OPENS, THINKS, bytes_tokenizer
from tests.rollout_worker.environments.test_environment_pool import KINDS, REWARD
from tests.services.group_rules import group_rules
from tests.tiny_model import CHAT_TEMPLATE

DEMO = "deploy/demo/model"
KEY = np.array([3, 4], np.uint32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


class Told(Conversation):
    """Stands for a conversation whose answers a test gives; None is one that does not come."""

    def __init__(self, answers):  # no process
        self.answers = list(answers)
        self.said = []
        self.ended = 0
        self.numbers = {}
        self.call = self._ask()

    def say(self, said):
        self.said.append(said)
        self.call = self._ask()

    def _ask(self, *, ends=False):
        future = Future()
        if self.answers[0] is not None:
            future.set_result(None)
        return future

    def answer(self):
        found = self.answers.pop(0)
        if isinstance(found, str):
            raise EnvironmentFailed(found)
        self.numbers |= found.numbers
        return found

    def end(self):
        self.ended += 1


class Pool(EnvironmentPool):
    """Whose episodes answer as a test says."""

    def __init__(self, scripts, **changes):  # no processes
        self._environment = EnvironmentConfig(name="a:B", **changes)
        self._composition = Composition.of(REWARD.functions, REWARD.combine)
        self._value_names = ValueNames()
        self.wants_tokens = True
        self.conversations = []
        self._scripts = iter(scripts)

    def begin_episode(self, item, seed):
        self.seed = seed
        self.conversations.append(Told(next(self._scripts)))
        return self.conversations[-1]


def said(text, reward=0.0, max_tokens=None):
    return Turn([{"role": "user", "content": text}], reward, False, max_tokens=max_tokens)


def given_ids(token_ids, max_tokens=None):
    return Turn([], 0.0, False, token_ids=token_ids, max_tokens=max_tokens)


OVER = Turn([], 1.0, True)


def begin(scripts, tokenizer, *, max_new_tokens=64, max_prompt_tokens=64, how=None, **changes):
    pool = Pool(scripts, **changes)
    request = DecodeRequest(
        request_id="g1/0",
        token_ids=np.array([1, 2], np.int32),
        prompt_id=7,
        epoch=2,
        samples=tuple(range(len(scripts))),
        max_new_tokens=max_new_tokens,
        key_data=KEY,
    )
    group = EpisodeGroup(
        request, {}, pool, tokenizer, max_prompt_tokens=max_prompt_tokens, **(how or {})
    )
    return group, pool


def drawn(request, sample, ids, stop, *, cut=False):
    """A row as the engine would return it: it ends with a stop token, or at its limit."""
    ids = np.array([*ids, stop], np.int32)
    full = cut or len(ids) > request.max_new_tokens
    ids = ids[: request.max_new_tokens]
    return FinishedRow(
        request_id=request.request_id,
        sample_index=sample,
        token_ids=ids,
        logprobs=-0.1 * np.arange(1, len(ids) + 1, dtype=np.float32),
        versions=np.full(len(ids), 3, np.int32),
        finish_reason=FinishReason.LENGTH if full and ids[-1] != stop else FinishReason.STOP,
    )


def as_completion(row):
    return Completion(
        sample_index=row.sample_index,
        token_ids=row.token_ids,
        behavior_logprobs=row.logprobs,
        finish_reason=row.finish_reason,
        rewards={},
        total_reward=0.0,
        segment_tokens=row.segment_tokens,
        record_starts=row.record_starts,
    )


TEXT = st.text(max_size=12) | st.sampled_from(
    ["<|im_end|>", "a<|im_start|>user\nb", "日本 é", "12"]
)
LIMIT = st.none() | st.integers(1, 9)
ANSWER = (
    st.builds(said, TEXT, st.floats(-1, 1), LIMIT)
    | st.builds(given_ids, st.lists(st.integers(0, 400), min_size=1, max_size=9), LIMIT)
    | st.just(OVER)
    | st.just("step: it fell")
)
SCRIPT = st.lists(ANSWER, min_size=8, max_size=8)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
OFFERS = "{% if tools %}{{ '<s>tools:' + (tools | tojson) + '</s>' }}{% endif %}" + CHAT_TEMPLATE


@functools.cache
def some_tokenizers():
    """Of several chat templates, with tools and without, and one that rewrites earlier turns."""
    small = [bytes_tokenizer(template) for template in (CHAT_TEMPLATE, OPENS, MARKS)]
    thinks = bytes_tokenizer(THINKS)
    offers = bytes_tokenizer(OFFERS).with_tools(TOOLS)
    return [load_tokenizer(DEMO), *small, offers, thinks]


@settings(deadline=None, max_examples=int(os.environ.get("TANDEM_EPISODES", "100")))
@given(
    data=st.data(),
    tokenizer=st.sampled_from(range(6)),
    scripts=st.lists(SCRIPT, min_size=1, max_size=3),
    longest=st.integers(1, 60),
    max_turns=st.integers(1, 6),
)
def test_trained_ids_are_sampled_ids_whatever_the_environment_says(
    tokenizer, data, scripts, longest, max_turns
):
    tokenizer = some_tokenizers()[tokenizer]
    first = said("Guess.")
    group, _ = begin(
        [[first, *script] for script in scripts],
        tokenizer,
        max_new_tokens=longest,
        max_turns=max_turns,
        max_prompt_tokens=200,
        history="keep",
    )
    [stop] = tokenizer.stop_ids
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i != stop), max_size=9)
    sampled = {sample: [] for sample in range(len(scripts))}
    asked = {sample: [] for sample in range(len(scripts))}
    while not group.done:
        for request in group.take_requests():
            for sample in request.samples:
                row = drawn(request, sample, data.draw(ids), stop)
                asked[sample].append((request.token_ids, request.key_data))
                sampled[sample].append(row)
                group.add_row(row)
    assert not group.in_engine and not group.calls
    prompt = tokenizer.encode_chat(first.messages)
    for row, score in zip(group.completions(), group.scores(), strict=True):
        its = sampled[row.sample_index]
        completion = as_completion(row)
        completion.check_segments()
        assert completion.turns == len(its) <= max_turns
        # What the model's segments hold is what was drawn, in order.
        own = row.token_ids[completion.is_sampled]
        np.testing.assert_array_equal(own, np.concatenate([one.token_ids for one in its]))
        np.testing.assert_array_equal(row.logprobs, np.concatenate([o.logprobs for o in its]))
        assert len(row.token_ids) <= longest
        # Every turn was drawn from exactly the tokens before it.
        whole, start = np.concatenate([prompt, row.token_ids]), len(prompt)
        lengths = row.segment_tokens or (len(row.token_ids),)
        for turn, (before, _) in enumerate(asked[row.sample_index]):
            np.testing.assert_array_equal(before, whole[:start])
            start += sum(lengths[2 * turn : 2 * turn + 2])
        # No turn repeats the draws of another one.
        keys = [tuple(key.tolist()) for _, key in asked[row.sample_index]]
        assert len(set(keys)) == len(keys) and keys[0] == tuple(KEY.tolist())
        assert (row.finish_reason is FinishReason.ABORTED) == bool(score.error)


def test_an_answer_is_what_the_template_would_have_written(tokenizer):
    [stop] = tokenizer.stop_ids
    won = OVER._replace(numbers={"guesses": 2.0})
    group, pool = begin([[said("Guess."), said("higher", 0.25), won]], tokenizer)
    turn = tokenizer._backend.encode("12", add_special_tokens=False)
    for _ in range(2):
        [request] = group.take_requests()
        group.add_row(drawn(request, 0, turn, stop))
    assert group.take_requests() == [] and group.done
    [row], [score] = group.completions(), group.scores()
    messages = [
        *[{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "12"}],
        *[{"role": "user", "content": "higher"}, {"role": "assistant", "content": "12"}],
    ]
    written = tokenizer.template.render(messages, add_generation_prompt=False).rstrip("\n")
    assert tokenizer.decode([*group.prompt_token_ids, *row.token_ids]) == written
    first, second = pool.conversations[0].said
    assert first.text == second.text == "12"
    assert first.before == list(group.prompt_token_ids) and second.token_ids == [*turn, stop]
    assert [*first.token_ids, *second.before, *second.token_ids] == row.token_ids.tolist()
    assert [*first.logprobs, *second.logprobs] == row.logprobs.tolist()
    assert score.rewards == {"environment": 1.25, "environment/guesses": 2.0}
    assert (row.finish_reason, score.total) == (FinishReason.STOP, 1.25)


@pytest.mark.parametrize(
    ("changes", "turns"),
    [({"max_turns": 2}, 2), ({"max_new_tokens": 11}, 1), ({"max_new_tokens": 2}, 1)],
)
def test_an_episode_ends_as_truncated_at_the_limit_of_turns_or_tokens(tokenizer, changes, turns):
    [stop] = tokenizer.stop_ids
    group, pool = begin(
        [[said("Guess."), *[said("higher and higher", 0.5)] * 9]], tokenizer, **changes
    )
    while not group.done:
        for request in group.take_requests():
            group.add_row(drawn(request, 0, [40, 41], stop))
    [row] = group.completions()
    assert row.finish_reason is FinishReason.LENGTH and as_completion(row).turns == turns
    assert pool.conversations[0].ended == 1


def test_episodes_that_cannot_begin_draw_one_token_each(tokenizer):
    [stop] = tokenizer.stop_ids
    other = Turn([{"role": "user", "content": "Another game."}], 0.0, False)
    scripts = [["reset: no"], [said("Guess."), OVER], [other, OVER]]
    group, pool = begin(scripts, tokenizer)
    good, failed = group.take_requests()
    assert (good.samples, failed.samples, failed.max_new_tokens) == ((1,), (0, 2), 1)
    group.add_row(drawn(good, 1, [40], stop))
    for sample in failed.samples:
        group.add_row(drawn(failed, sample, [41], stop))
    assert group.take_requests() == [] and group.done
    assert [len(row.token_ids) for row in group.completions()] == [1, 2, 1]
    first, second, third = group.scores()
    assert (first.error, second.error) == ("environment_error: reset: no", "")
    assert "both must be the same" in third.error
    assert [conversation.ended for conversation in pool.conversations] == [1, 1, 1]


def test_completions_of_a_group_begin_with_the_same_limit(tokenizer):
    scripts = [[said("Guess.", max_tokens=9), OVER], [said("Guess.", max_tokens=8), OVER]]
    group, _ = begin(scripts, tokenizer)
    for request in group.take_requests():
        for sample in request.samples:
            group.add_row(drawn(request, sample, [], 41))
    assert "with max_tokens=8 for the item and seed for which" in group.scores()[1].error


def test_a_group_closes_without_those_that_it_waits_for_no_longer(tokenizer):
    [stop] = tokenizer.stop_ids
    now = [100.0]
    scripts = [
        [said("Guess."), OVER],
        [said("Guess."), said("higher", 0.5), None],  # decodes a second turn
        [said("Guess."), None],  # is never answered
        [said("Guess."), "step 1: it fell"],
        [said("Guess."), OVER],
    ]
    group, pool = begin(
        scripts, tokenizer, close_at_least=2, close_after_s=30, how={"now": lambda: now[0]}
    )
    [first] = group.take_requests()
    group.add_row(drawn(first, 0, [40], stop))
    group.add_row(drawn(first, 1, [41, 42], stop))
    [second] = group.take_requests()
    now[0] += 31
    assert group.drop_late() == [], "two have no turn, and one alone has ended well"
    group.add_row(drawn(first, 2, [43], stop))
    group.add_row(drawn(first, 3, [44], stop))
    assert group.take_requests() == [] and group.drop_late() == []
    group.add_row(drawn(first, 4, [45], stop))
    assert group.take_requests() == [] and not group.done
    now[0] -= 2
    assert group.drop_late() == [], "not yet"
    now[0] += 2
    assert group.drop_late() == [second.request_id]
    assert group.done and not group.in_engine and not group.calls and group.drop_late() == []
    reasons = [FinishReason.STOP, *[FinishReason.ABORTED] * 3, FinishReason.STOP]
    for row, reason, ids in zip(
        group.completions(), reasons, ([40], [41, 42], [43], [44], [45]), strict=True
    ):
        assert row.finish_reason is reason and row.token_ids.tolist() == [*ids, stop]
        as_completion(row).check_segments()
    errors = [score.error for score in group.scores()]
    late = (
        "environment_error: its group closed with 2 of 5 after 30 s (environment.close_at_least=2)"
    )
    assert errors == ["", late, late, "environment_error: step 1: it fell", ""]
    assert [conversation.ended for conversation in pool.conversations] == [1] * 5


def test_an_evaluation_waits_for_all(tokenizer):
    [stop] = tokenizer.stop_ids
    scripts = [[said("Guess."), OVER], [said("Guess."), OVER], [said("Guess."), None]]
    how = {"now": iter([0.0, 1e9]).__next__, "waits_for_all": True}
    group, _ = begin(scripts, tokenizer, close_at_least=2, how=how)
    [first] = group.take_requests()
    for sample in first.samples:
        group.add_row(drawn(first, sample, [40], stop))
    assert group.take_requests() == [] and group.drop_late() == [] and not group.done


def test_where_no_episode_can_begin_the_prompt_is_that_of_the_record(tokenizer):
    group, _ = begin([["reset: no"], [said("x" * 500)]], tokenizer)
    [request] = group.take_requests()
    np.testing.assert_array_equal(request.token_ids, [1, 2])
    for sample in request.samples:
        group.add_row(drawn(request, sample, [41], 40))
    assert "at most rollout.max_prompt_tokens=64" in group.scores()[1].error


def test_the_seed_is_of_the_prompt_and_its_pass():
    seeds = {seed_of(KEY, prompt, epoch) for prompt in range(3) for epoch in range(3)}
    assert len(seeds) == 9 and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(KEY, 1, 0) != seed_of(np.array([3, 5], np.uint32), 1, 0)


# A worker with an engine and processes.


@pytest.fixture(scope="module")
def policy(programs_compiled_once):
    """The demo's weights by name, and their manifest."""
    from models.files.checkpoint import to_named

    loaded = load_model(DEMO)
    named = {n: np.asarray(a) for n, a in to_named(loaded.params, loaded.config).items()}
    _, digest = tree_digest(named)
    manifest = WeightManifest(run_id="run", policy_version=0, tensors=(), digest=digest)
    return loaded, named, manifest


def make_core(
    policy,
    kind="Dialog",
    timeout_s=HANG_S,
    module=KINDS,
    closes=None,
    parked=12,
    temperature=1.0,
    template=None,
    history="as_rendered",
    **params,
):
    from services.wire.tls import RunAuthority
    from tests.rollout_worker.test_actor import worker_spec

    authority = RunAuthority.create("run")
    spec = worker_spec(
        DEMO,
        authority,
        "127.0.0.1:1",
        chat_template=template,
        data=DataConfig(
            train=SourceConfig(source="reasoning_gym:chain_sum", size=8),
            eval=SourceConfig(source="reasoning_gym:chain_sum", size=4, seed=99),
        ),
        rollout=RolloutConfig(
            prompts_per_step=2,
            completions_per_prompt=4,
            max_prompt_tokens=64,
            max_completion_tokens=96,
            temperature=temperature,
            # All that a test begins is parked: no draw depends on how long an environment takes.
            decode=DecodeConfig(slots=4, segment_tokens=8, compute_dtype="float32", parked=parked),
        ),
        reward=REWARD,
        environment=EnvironmentConfig(
            name=f"{module}:{kind}",
            params=params,
            max_turns=4,
            timeout_s=timeout_s,
            history=history,
            **(closes or {}),
        ),
        weights_dtype="bfloat16",
    )
    core = WorkerCore(spec, jax.devices()[:1], PhaseClock())
    _, named, manifest = policy
    core.worker.swap_policy(manifest, named)
    return core


def leased(index):
    return LeasedGroup(Lease(group_id=f"g{index:08d}", attempt=0, epoch=0, position=index))


def played(core, indices=(0, 1, 2)):
    groups = [leased(index) for index in indices]
    core.worker.begin_groups(groups)
    finished = []
    while core.worker.busy:
        finished += core.worker.advance(0.2)
    assert {id(one) for one in finished} == {id(one) for one in groups}
    return [one.group for one in groups]


def essence(group):
    """All that training reads, as bytes."""
    return [
        (
            c.token_ids.tobytes(),
            c.behavior_logprobs.tobytes(),
            c.segment_tokens,
            c.finish_reason,
            c.total_reward,
            c.reward_error,
        )
        for c in group.completions
    ] + [group.prompt_token_ids.tobytes()]


def pairs_of(groups, again):
    """The same completion of both."""
    return [
        pair
        for one, other in zip(groups, again, strict=True)
        for pair in zip(one.completions, other.completions, strict=True)
    ]


@pytest.fixture(scope="module")
def groups(policy):
    core = make_core(policy)
    try:
        found = played(core)
        engine = core.worker._engine
        later_turns = sum(c.turns - 1 for group in found if group for c in group.completions)
        assert engine.counts.reused_tokens > 20 * later_turns > 0 == engine.parked
        use = core.worker.take_engine_use()
        assert use.reused_tokens == engine.counts.reused_tokens
        assert (use.tokens, use.slot_steps) == (engine.counts.tokens, engine.counts.slot_steps)
        assert core.worker.take_engine_use() == EngineUse(parked=0)
        yield found
    finally:
        core.close()


@pytest.mark.slow
def test_groups_of_episodes_pass_the_door_and_their_logprobs_are_the_models(groups, policy):
    loaded, *_ = policy
    rules = group_rules(
        "run", group_size=4, max_prompt_tokens=64, max_completion_tokens=96, order=None
    )
    assert max(c.turns for group in groups for c in group.completions) > 1
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), loaded.params)
    for group in groups:
        check_group(group, rules)
        for completion in group.completions:
            ids = np.concatenate([group.prompt_token_ids, completion.token_ids])
            padded = np.pad(ids, (0, 160 - len(ids)))[None]
            hidden, _ = _forward(params, loaded.config, padded)
            logprob = jax.nn.log_softmax(logits(hidden, head_weight(params)), axis=-1)[0]
            first = len(group.prompt_token_ids)
            places = first + np.flatnonzero(completion.is_sampled)
            expected = np.asarray(logprob)[places - 1, ids[places]]
            np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=2e-3)


def _forward(params, config, ids):
    return forward(
        params,
        config,
        ids,
        np.arange(ids.shape[1])[None],
        packed_attend(np.ones_like(ids), operand_dtype=jnp.dtype("float32")),
        compute_dtype=jnp.dtype("float32"),
    )


@pytest.mark.slow
def test_a_run_is_the_same_when_repeated_whatever_the_environments_take_and_lose(
    groups, policy, tmp_path
):
    mark = tmp_path / "died"
    core = make_core(policy, pause_s=0.05, die_at=2, mark=str(mark))
    try:
        again = played(core)
    finally:
        core.close()
    assert mark.exists()
    for one, other in zip(groups, again, strict=True):
        assert essence(one) == essence(other)


@pytest.mark.slow
def test_an_environment_that_hangs_in_a_run_ends_its_own_episodes_alone(groups, policy, tokenizer):
    core = make_core(policy, "Stuck", timeout_s=5.0)
    try:
        again = played(core)
    finally:
        core.close()
    pairs = pairs_of(groups, again)
    failed = [(before, after) for before, after in pairs if after.reward_error]
    assert 0 < len(failed) < len(pairs)
    for before, after in failed:
        text = tokenizer.decode_completion(after.token_ids)
        assert len(text) % 4 == 0 and "no result within 5 s" in after.reward_error
        assert after.finish_reason is FinishReason.ABORTED and not after.segment_tokens
        np.testing.assert_array_equal(after.token_ids, before.token_ids[: len(after.token_ids)])
    for before, after in pairs:
        if not after.reward_error:
            np.testing.assert_array_equal(after.token_ids, before.token_ids)
            np.testing.assert_array_equal(after.behavior_logprobs, before.behavior_logprobs)
            assert after.total_reward == before.total_reward


@pytest.mark.slow
def test_groups_of_a_run_close_without_environments_that_hang(groups, policy):
    closes = {"close_at_least": 2, "close_after_s": 0.01}
    core = make_core(policy, "Stuck", closes=closes)
    try:
        again = played(core)
        assert core.worker._engine.parked == 0
    finally:
        core.close()
    pairs = pairs_of(groups, again)
    late = [(before, after) for before, after in pairs if after.reward_error]
    assert 0 < len(late) < len(pairs)
    for before, after in late:
        assert " of 4 after 0.01 s" in after.reward_error
        np.testing.assert_array_equal(after.token_ids, before.token_ids[: len(after.token_ids)])
    for group in again:
        assert sum(not c.reward_error for c in group.completions) >= 2
        check_group(
            group,
            group_rules(
                "run", group_size=4, max_prompt_tokens=64, max_completion_tokens=96, order=None
            ),
        )


@pytest.mark.slow
def test_a_run_that_parks_nothing_counts_what_it_prefills(groups, policy):
    core = make_core(policy, parked=0)
    try:
        again = played(core)
        use = core.worker.take_engine_use()
    finally:
        core.close()
    for before, after in pairs_of(groups, again):
        np.testing.assert_array_equal(before.token_ids, after.token_ids)
    starts = []  # of turns: a prompt once for its group, each later turn anew
    for group in again:
        prompt = len(group.prompt_token_ids)
        starts.append(prompt)
        for completion in group.completions:
            ends = np.cumsum(completion.segment_tokens)
            starts += [prompt + int(end) for end in ends[1::2]]
    assert len(starts) > len(again)
    # The last token of a prompt is a token step.
    expected = sum(start - 1 for start in starts)
    assert use.prefilled_tokens == expected
    assert (use.parked, use.parked_bytes, use.reused_tokens) == (0, 0, 0)


@pytest.mark.slow
def test_a_cancelled_group_ends_in_silence_and_is_whole_when_it_comes_again(groups, policy):
    core = make_core(policy)
    try:
        gone, other = leased(0), leased(1)
        core.worker.begin_groups([gone, other])
        for _ in range(4):
            assert core.worker.advance(0.2) in ([], [other])
        gone.cancelled = True
        core.worker.drop_cancelled()
        again = leased(0)
        core.worker.begin_groups([again])
        while core.worker.busy:
            core.worker.advance(0.2)
        assert gone.group is None and again.group is not None
        assert essence(again.group) == essence(groups[0])
        assert other.group is not None and essence(other.group) == essence(groups[1])
    finally:
        core.close()


@pytest.mark.slow
def test_an_evaluation_beside_training_plays_the_games_of_one_that_is_alone(groups, policy):
    core = make_core(policy, pause_s=0.01)
    worker = core.worker
    try:
        how = {"samples": 2, "sampling": SamplingSettings(temperature=1.0)}
        alone = worker.evaluate(0, (2, 0), **how)
        worker.keep_version(0)
        share = IdleShare(
            EvalRequest(positions=(2, 0), policy_version=0, timeout_s=HANG_S, when_idle=True, **how)
        )
        for turns in (3, 6):
            worker.begin_evaluation(share)
            for _ in range(turns):
                assert worker.advance(0.2) == []
            assert not share.ended
            worker.pause_evaluation()  # in the middle of episodes
            [again] = played(core, (1,))
            assert essence(again) == essence(groups[1])
        worker.begin_evaluation(share)
        while worker.evaluating:
            worker.advance(0.2)
        assert share.wait() == alone
    finally:
        core.close()
    assert [item.sample_index for item in alone] == [0, 1, 0, 1]
    assert all(set(item.rewards) == {"environment"} for item in alone)
    assert len({item.total_reward for item in alone}) > 1


@pytest.mark.slow
def test_an_evaluation_of_a_run_that_closes_groups_waits_for_all(policy):
    closes = {"close_at_least": 2, "close_after_s": 0.01}
    core = make_core(policy, pause_s=0.05, closes=closes)
    try:
        how = {"samples": 4, "sampling": SamplingSettings(temperature=1.0)}
        items = core.worker.evaluate(0, (0, 1, 2), **how)
    finally:
        core.close()
    assert [item.reward_error for item in items] == [""] * 12
