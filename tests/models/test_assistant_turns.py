"""Which tokens of a conversation train: exactly what the assistant wrote, its end included."""

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from deploy.demo import make_model
from models.tokenizer import Tokenizer
from tests.tiny_model import CHAT_TEMPLATE

USER, ASSISTANT = "user", "assistant"
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": USER, "content": "4 - 9 ="},
    {"role": ASSISTANT, "content": "-5"},
    {"role": USER, "content": "and + 7?"},
    {"role": ASSISTANT, "content": "#### 2"},
]
THINKS = (  # as templates of reasoning models do: earlier turns lose their reasoning
    "{% for m in messages %}{{ '<s>' + m.role + ':' }}"
    "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)
OPENS = CHAT_TEMPLATE.replace("<s>assistant:' }}{% endif", "<s>assistant:<think>' }}{% endif")
MARKS = (
    "{% for m in messages %}{{ '<s>' + m.role + ':' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ '</s>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


def bytes_tokenizer(template=CHAT_TEMPLATE, **changes) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={b: i for i, b in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", **changes
    )
    fast.chat_template = template
    return Tokenizer(fast, source="bytes")


@pytest.fixture(scope="module")
def tokenizer():
    return bytes_tokenizer()


def trained_parts(tokenizer, encoded) -> list[str]:
    """The text of each run of tokens that train."""
    parts, before = [], False
    for token_id, trains in zip(encoded.token_ids, encoded.trains, strict=True):
        if trains and not before:
            parts.append([])
        if trains:
            parts[-1].append(token_id)
        before = trains
    return [tokenizer.decode(part) for part in parts]


def test_every_turn_trains_with_its_end_and_nothing_else(tokenizer):
    encoded = tokenizer.encode_turns(TURNS, [2, 4])
    assert trained_parts(tokenizer, encoded) == ["-5</s>", "#### 2</s>"]
    assert tokenizer.decode(encoded.token_ids) == (
        "<s>system:Be brief.</s><s>user:4 - 9 =</s><s>assistant:-5</s>"
        "<s>user:and + 7?</s><s>assistant:#### 2</s>"
    )
    assert encoded.open_turns == 0


def test_a_turn_may_be_left_out_of_the_loss(tokenizer):
    encoded = tokenizer.encode_turns(TURNS, [4])
    assert trained_parts(tokenizer, encoded) == ["#### 2</s>"]
    first = tokenizer.encode_turns(TURNS, [2])
    assert first.token_ids == encoded.token_ids[: len(first.token_ids)], "cut after what trains"


def test_the_prompt_of_the_first_turn_is_that_of_a_run_and_what_ends_the_turn_belongs_to_no_turn():
    demo = make_model.build_tokenizer()
    encoded = demo.encode_turns(TURNS, [2, 4])
    asked = demo.encode_chat(TURNS[:2])
    assert encoded.token_ids[: len(asked)] == asked and not any(encoded.trains[: len(asked)])
    assert trained_parts(demo, encoded) == ["-5<|im_end|>", "#### 2<|im_end|>"]
    whole = demo._backend.apply_chat_template(TURNS, return_dict=False)
    assert encoded.token_ids == whole[:-1], "all but the line feed after the last end"


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=6))
def test_whatever_is_said_the_trained_tokens_are_what_the_assistant_said(tokenizer, texts):
    messages = [
        {"role": (USER, ASSISTANT)[place % 2], "content": text} for place, text in enumerate(texts)
    ]
    turns = [place for place in range(len(messages)) if place % 2]
    encoded = tokenizer.encode_turns(messages, turns)
    assert trained_parts(tokenizer, encoded) == [f"{texts[place]}</s>" for place in turns]
    asked = tokenizer.encode_chat(messages[:1])
    assert encoded.token_ids[: len(asked)] == asked


def test_an_answer_that_spells_an_end_of_turn_does_not_end_it(tokenizer):
    messages = [TURNS[1], {"role": ASSISTANT, "content": "it is </s> here"}]
    encoded = tokenizer.encode_turns(messages, [1])
    assert trained_parts(tokenizer, encoded) == ["it is </s> here</s>"]
    assert sum(one in tokenizer.stop_ids for one in encoded.token_ids) == 2, "of the template"


def test_a_template_that_rewrites_earlier_turns_is_refused_and_its_last_turn_trains():
    tokenizer = bytes_tokenizer(THINKS)
    said = [*TURNS[1:]]
    said[1] = {"role": ASSISTANT, "content": "<think>nine</think>-5"}
    with pytest.raises(ValueError, match="rewrites message 1, a turn of the assistant"):
        tokenizer.encode_turns(said, [1, 3])
    encoded = tokenizer.encode_turns(said, [3])
    assert trained_parts(tokenizer, encoded) == ["#### 2</s>"]
    assert "think" not in tokenizer.decode(encoded.token_ids)


def test_a_prompt_that_opens_a_turn_in_another_way_than_it_is_written_is_refused():
    with pytest.raises(ValueError, match=r"ends the prompt of message 2 in .*<think>"):
        bytes_tokenizer(OPENS).encode_turns(TURNS, [2])


def test_an_answer_that_the_template_leaves_out_is_refused():
    shown = "(message.content[:20] if message.role == 'assistant' else message.content)"
    silent = CHAT_TEMPLATE.replace("message['content']", shown)
    long = [TURNS[1], {"role": ASSISTANT, "content": "9 " * 200}]
    with pytest.raises(ValueError, match="leaves message 1 of role 'assistant'"):
        bytes_tokenizer(silent).encode_turns(long, [1])


def test_marks_of_the_template_say_what_trains_as_transformers_has_it():
    tokenizer = bytes_tokenizer(MARKS)
    encoded = tokenizer.encode_turns(TURNS, [2, 4])
    theirs = tokenizer._backend.apply_chat_template(
        TURNS, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.token_ids == theirs["input_ids"]
    assert encoded.trains == [bool(one) for one in theirs["assistant_masks"]]
    only = tokenizer.encode_turns(TURNS, [4])
    assert trained_parts(tokenizer, only) == ["#### 2</s>"]


def test_marks_without_the_end_of_a_turn_are_obeyed_and_counted():
    open_ended = MARKS.replace("{{ '</s>' }}{% endgeneration %}", "{% endgeneration %}{{ '</s>' }}")
    encoded = bytes_tokenizer(open_ended).encode_turns(TURNS, [2, 4])
    assert trained_parts(bytes_tokenizer(), encoded) == ["-5", "#### 2"]
    assert encoded.open_turns == 2


def test_marks_that_do_not_match_the_turns_are_refused():
    user_too = MARKS.replace("{% if m.role == 'assistant' %}", "{% if m.role != 'system' %}")
    with pytest.raises(ValueError, match=r"4 parts in \{% generation %\} for 2 messages"):
        bytes_tokenizer(user_too).encode_turns(TURNS, [2, 4])


def test_a_part_within_a_conversation_gets_no_blank_that_begins_a_text():
    words = ["<unk>", "▁", "\n", "a", "b", "▁a", "▁b", "U:", "▁U:", "A:"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)} | {"U": 10, ":": 11, "A": 12, "▁U": 13},
            merges=[("▁", "a"), ("▁", "b"), ("A", ":")],
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ 'A:' if m.role == 'assistant' else 'U:' }}{{ m.content }}"
        "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    tokenizer = Tokenizer(fast, source="words")
    said = [{"role": USER, "content": "b"}, {"role": ASSISTANT, "content": "a"}]
    encoded = tokenizer.encode_turns(said, [1])
    trained = [i for i, t in zip(encoded.token_ids, encoded.trains, strict=True) if t]
    assert fast.convert_ids_to_tokens(trained) == ["a", "</s>"]


def test_plain_text_trains_whole_and_ends_once(tokenizer):
    encoded = tokenizer.encode_text("once upon")
    assert trained_parts(tokenizer, encoded) == ["nce upon</s>"], "nothing precedes the first token"
    assert tokenizer.encode_text("once upon</s>") == encoded
