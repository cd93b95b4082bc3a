"""Episodes of several records: what a template writes anew begins one, before the next turn."""

import functools
import os

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.load_tokenizer import load_tokenizer
from models.transformer import head_weight, logits
from services.trajectories.group_check import check_group
from services.wire.messages import FinishReason
from tests.models.test_assistant_turns import OPENS, THINKS, bytes_tokenizer
from tests.rollout_worker.environments.test_episodes import (
    DEMO,
    OVER,
    TEXT,
    _forward,
    as_completion,
    begin,
    drawn,
    essence,
    given_ids,
    make_core,
    played,
    policy,  # noqa: F401 - a fixture
    said,
)
from tests.services.group_rules import group_rules
from tests.tiny_model import CHAT_TEMPLATE

STEPS = (  # the demo's, which leaves out of earlier turns all but the last word
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content.split(' ')[-1] if m.role == 'assistant' else m.content }}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def some_tokenizers():
    """Of templates that never rewrite a turn, that drop its reasoning, and that always do."""
    return [bytes_tokenizer(template) for template in (CHAT_TEMPLATE, THINKS, OPENS)]


class Reference:
    """What an episode should be, turn by turn, by rendering the whole conversation each time."""

    def __init__(self, tokenizer, first):
        self.tokenizer = tokenizer
        self.messages = list(first.messages)
        self.text = self.rendered()
        self.ids = tokenizer.encode_chat(self.messages)
        self.records = [([(token, False) for token in self.ids])]

    def rendered(self):
        return self.tokenizer.template.render(self.messages, add_generation_prompt=True)

    def add(self, row, answer):
        """A turn of the model and what followed it."""
        self.records[-1] += [(token, True) for token in row.token_ids.tolist()]
        text = self.tokenizer.decode_completion(row.token_ids)
        self.messages += [{"role": "assistant", "content": text}, *answer.messages]
        before, self.text = self.text + text, self.rendered()
        if not self.text.startswith(before):
            self.ids = self.tokenizer.encode_chat(self.messages)
            self.records.append([(token, False) for token in self.ids])
            return
        rest = self.tokenizer._backend.encode(
            self.text.removeprefix(before), add_special_tokens=False
        )
        written = rest[int(row.token_ids[-1] == rest[0]) :]
        self.ids = [*self.ids, *row.token_ids.tolist(), *written]
        self.records[-1] += [(token, False) for token in written]


ANSWER = st.builds(said, TEXT, st.floats(-1, 1), st.none() | st.integers(1, 30)) | st.just(OVER)
REASONED = [*b"a</think>9"]


@settings(deadline=None, max_examples=int(os.environ.get("TANDEM_EPISODES", "100")))
@given(
    data=st.data(),
    which=st.sampled_from(range(3)),
    scripts=st.lists(st.lists(ANSWER, min_size=6, max_size=6), min_size=1, max_size=2),
    longest=st.integers(1, 160),
)
def test_each_turn_goes_on_from_what_the_template_writes(which, data, scripts, longest):
    tokenizer = some_tokenizers()[which]
    first = said("Guess.")
    group, _ = begin(
        [[first, *script] for script in scripts],
        tokenizer,
        max_new_tokens=longest,
        max_turns=5,
        max_prompt_tokens=200,
        history="new_record",
    )
    [stop] = tokenizer.stop_ids
    byte = tokenizer._backend.convert_tokens_to_ids
    reasoned = [byte(chr(one)) for one in REASONED]
    ids = st.just(reasoned) | st.lists(st.integers(0, 255).filter(lambda i: i != stop), max_size=9)
    references = {sample: Reference(tokenizer, first) for sample in range(len(scripts))}
    rows = {sample: [] for sample in range(len(scripts))}
    while not group.done:
        for request in group.take_requests():
            for sample in request.samples:
                its = rows[sample]
                if its:
                    references[sample].add(its[-1], scripts[sample][len(its) - 1])
                assert request.token_ids.tolist() == references[sample].ids
                its.append(drawn(request, sample, data.draw(ids), stop))
                group.add_row(its[-1])
    prompt = group.prompt_token_ids
    for row in group.completions():
        completion, reference = as_completion(row), references[row.sample_index]
        completion.check_segments()
        last = rows[row.sample_index][-1].token_ids.tolist()
        reference.records[-1] += [(token, True) for token in last]
        records = completion.records(prompt)
        drawn_in_all = np.concatenate([record.behavior_logprobs for record in records])
        np.testing.assert_array_equal(drawn_in_all, row.logprobs)
        assert [
            list(zip(record.token_ids.tolist(), record.is_sampled.tolist(), strict=True))
            for record in records
        ] == reference.records
        assert all(len(record.token_ids) <= len(prompt) + longest for record in records)
        assert all(len(record.behavior_logprobs) == sum(record.is_sampled) for record in records)


def turns(tokenizer, *texts, ends=OVER, **changes):
    """An episode whose model says these texts, each answered by `Again.`, until `ends`."""
    script = [said("Guess."), *[said("Again.", 0.25)] * (len(texts) - 1), ends]
    group, pool = begin([script], tokenizer, history="new_record", **changes)
    [stop] = tokenizer.stop_ids
    asked = []
    for text in texts:
        [request] = group.take_requests()
        asked.append(request)
        ids = tokenizer._backend.encode(text, add_special_tokens=False)
        group.add_row(drawn(request, 0, ids, stop))
    assert group.take_requests() == []
    return group, pool, asked


def test_a_turn_whose_reasoning_is_left_out_later_begins_a_record():
    tokenizer = bytes_tokenizer(THINKS)
    group, pool, asked = turns(tokenizer, "7", "ab</think>8", "9", max_new_tokens=200)
    assert [tokenizer.decode(request.token_ids) for request in asked] == [
        "<s>user:Guess.</s><s>assistant:",
        "<s>user:Guess.</s><s>assistant:7</s><s>user:Again.</s><s>assistant:",
        "<s>user:Guess.</s><s>assistant:7</s><s>user:Again.</s><s>assistant:8</s>"
        "<s>user:Again.</s><s>assistant:",
    ]
    [row] = group.completions()
    assert row.record_starts == (3,) and row.finish_reason is FinishReason.STOP
    assert group.scores()[0].total == 1.5
    first, second = as_completion(row).records(group.prompt_token_ids)
    sampled = tokenizer.decode(first.token_ids[first.is_sampled])
    assert sampled == "7</s>ab</think>8</s>"
    assert tokenizer.decode(second.token_ids[second.is_sampled]) == "9</s>"
    # A function is told what it read.
    assert [one.is_new_record for one in pool.conversations[0].said] == [False, False, True]
    assert pool.conversations[0].said[2].before == asked[2].token_ids.tolist()


def test_a_record_may_be_as_long_as_the_prompt_and_a_completion():
    tokenizer = bytes_tokenizer(THINKS)
    long = "a" * 30 + "</think>8"
    group, _, asked = turns(tokenizer, long, long, "9", max_new_tokens=80)
    [row] = group.completions()
    assert row.record_starts == (1, 3)
    assert len(row.token_ids) > 80 and len(row.logprobs) > 80
    for request in asked:
        read = len(request.token_ids) - len(group.prompt_token_ids)
        assert request.max_new_tokens == 80 - read
    one = [said("Guess."), said("x" * 70)]
    full, _ = begin([one], tokenizer, max_new_tokens=60, history="new_record")
    [request] = full.take_requests()
    [stop] = tokenizer.stop_ids
    full.add_row(drawn(request, 0, [65], stop))
    assert full.take_requests() == [] and full.completions()[0].finish_reason is FinishReason.LENGTH


def test_a_group_that_closes_drops_the_record_that_was_begun():
    tokenizer = bytes_tokenizer(THINKS)
    [stop] = tokenizer.stop_ids
    now = [0.0]
    scripts = [[said("Guess."), OVER], [said("Guess."), OVER], [said("Guess."), said("Again.")]]
    group, _ = begin(
        scripts,
        tokenizer,
        history="new_record",
        close_at_least=2,
        close_after_s=1,
        how={"now": lambda: now[0]},
    )
    [first] = group.take_requests()
    thought = tokenizer._backend.encode("a</think>8", add_special_tokens=False)
    for sample in first.samples:
        group.add_row(drawn(first, sample, thought, stop))
    [second] = group.take_requests()
    now[0] += 2
    assert group.drop_late() == [second.request_id]
    late = group.completions()[2]
    assert late.record_starts == () and late.finish_reason is FinishReason.ABORTED
    as_completion(late).check_segments()


def test_an_agent_that_gives_token_ids_has_one_record():
    tokenizer = bytes_tokenizer(THINKS)
    [stop] = tokenizer.stop_ids
    group, _ = begin([[given_ids([1, 2]), given_ids([3]), OVER]], tokenizer, history="new_record")
    for read in ([1, 2], [1, 2, 65, stop, 3]):
        [request] = group.take_requests()
        assert request.token_ids.tolist() == read
        group.add_row(drawn(request, 0, [65], stop))
    assert group.take_requests() == [] and group.completions()[0].record_starts == ()


# A worker with an engine and processes.


@pytest.fixture(scope="module")
def groups(policy):  # noqa: F811 - the fixture
    found = []
    for parked in (12, 0):
        core = make_core(policy, parked=parked, template=STEPS, history="new_record")
        try:
            found.append((played(core, range(7)), core.worker.take_engine_use()))
        finally:
            core.close()
    return found


@pytest.mark.slow
def test_records_pass_the_door_and_their_logprobs_are_the_models(groups, policy):  # noqa: F811
    loaded, *_ = policy
    rules = group_rules(
        "run", group_size=4, max_prompt_tokens=64, max_completion_tokens=96, order=None
    )
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), loaded.params)
    tokenizer = load_tokenizer(DEMO)
    found, _ = groups[0]
    records = 0
    for group in found:
        check_group(group, rules)
        for completion in group.completions:
            for record in completion.records(group.prompt_token_ids)[1:]:
                records += 1
                assert tokenizer.decode(record.token_ids).startswith("<|im_start|>system\nCount.")
                ids = np.pad(record.token_ids, (0, 160 - len(record.token_ids)))[None]
                hidden, _ = _forward(params, loaded.config, ids)
                logprob = jax.nn.log_softmax(logits(hidden, head_weight(params)), axis=-1)[0]
                places = np.flatnonzero(record.is_sampled)
                expected = np.asarray(logprob)[places - 1, ids[0, places]]
                np.testing.assert_allclose(record.behavior_logprobs, expected, atol=2e-3)
    assert records > 3


@pytest.mark.slow
def test_what_is_parked_is_reused_as_far_as_it_was_not_rewritten(groups):
    (parked, use), (anew, without) = groups
    assert use.reused_tokens > 0 == without.reused_tokens
    for one, other in zip(parked, anew, strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
            assert mine.record_starts == theirs.record_starts
        assert [part[2:] for part in essence(one)[:-1]] == [p[2:] for p in essence(other)[:-1]]
