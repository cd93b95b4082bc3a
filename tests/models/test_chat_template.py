"""What a template reads beside the messages, and what it leaves out of them."""

import datetime
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from models.chat_template import ChatTemplate, clock_of

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
SYSTEM = "Give the answer after ####."
ASKED = [{"role": "user", "content": "3 + 4 ="}]
NEW_YORK = datetime.timezone(datetime.timedelta(hours=-5))
MOMENT = datetime.datetime(2026, 1, 31, 23, 59, 59, tzinfo=NEW_YORK)
ZONES = ["UTC", "Asia/Tokyo", "America/New_York"]


def template_of(text, moment=MOMENT):
    return ChatTemplate(
        text, {"bos_token": "<s>"}, name="model.chat_template", fix="correct it", moment=moment
    )


@pytest.fixture(params=ZONES)
def zone(request, monkeypatch):
    """Time zone of a process."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


# --- the clock


@pytest.mark.parametrize(
    "format, written",
    [
        ("%d %b %Y", "31 Jan 2026"),
        ("%Y-%m-%d %H:%M:%S", "2026-01-31 23:59:59"),
        ("%s", "1769921999"),
        ("%j %Z%z %%s", "031  %s"),
    ],
    ids=["day", "second", "epoch", "zone"],
)
def test_a_template_reads_the_moment_of_the_run_in_every_time_zone_N16(zone, format, written):
    clock = f"{{% if strftime_now is defined %}}{{{{ strftime_now('{format}') }}}}|{{% endif %}}"
    template = template_of(clock + TURNS + OPENING)
    assert template.reads_clock
    text = template.render(ASKED, add_generation_prompt=True)
    assert text == f"{written}|<|user|>3 + 4 =<|end|><|assistant|>"


def test_the_moment_is_written_as_transformers_writes_the_present():
    now = datetime.datetime.now().astimezone()
    assert clock_of(now)("%a %d %B %y, %I %p %Z%z") == datetime.datetime.now().strftime(
        "%a %d %B %y, %I %p %Z%z"
    )


def test_only_a_template_that_asks_for_the_time_reads_the_clock():
    assert not template_of(TURNS).reads_clock
    assert template_of("{% set f = strftime_now %}{{ f('%f') }}" + TURNS).reads_clock
    assert not template_of("{% if strftime_now is defined %}{% endif %}" + TURNS).reads_clock


def test_a_template_without_a_moment_reads_the_time_once(monkeypatch):
    template = template_of("{{ strftime_now('%f') }}" + TURNS, moment=None)
    texts = {template.render(ASKED, add_generation_prompt=True) for _ in range(50)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    "drawing, name",
    [
        ("{{ ['Hello', 'Hi'] | random }}", "random"),
        ("{{ lipsum(n=1) }}", "lipsum"),
        ("{% set text = ['a', 'b'] | random | upper %}{{ text }}", "random"),
        ("{{ [[1, 2]] | map('random') | list }}", "random"),
    ],
)
def test_a_template_that_draws_random_numbers_is_refused_N16(drawing, name):
    with pytest.raises(ValueError, match=f"draws random numbers by `{name}`.*correct it"):
        template_of(drawing + TURNS)


@pytest.mark.parametrize(
    "text",
    [
        TURNS + OPENING,
        INSTRUCT,
        "{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}" + TURNS,
        "  {% for m in messages %}\n {% generation %}{{ m.content }}{% endgeneration %}"
        "{% endfor %}",
        "{{ dict(a=1) | tojson }}{% set ns = namespace(n=0) %}{{ ns.n }}" + TURNS,
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_is_what_transformers_renders(text, add_generation_prompt):
    messages = [*ASKED, {"role": "assistant", "content": " 7 "}, *ASKED]
    expected, _ = render_jinja_template(
        [messages],
        chat_template=text,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
    )
    template = template_of(text)
    assert [template.render(messages, add_generation_prompt=add_generation_prompt)] == expected


@pytest.mark.parametrize(
    "printing, kind",
    [
        ("{{ joiner() }}", "Joiner"),
        ("{{ messages.count }}", "builtin_function_or_method"),
        ("{{ strftime_now }}", "function"),
    ],
)
def test_a_template_that_prints_the_address_of_an_object_is_refused(printing, kind):
    with pytest.raises(ValueError, match=f"it prints a {kind}, whose text differs.*correct it"):
        template_of(printing + TURNS)


# --- what is left out


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves the system prompt, or a part of it, out",
        ),
        ("{{ messages[-1].content }}", "leaves the system prompt, or a part of it, out"),
        (
            "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system role') }}"
            "{% endfor %}" + TURNS,
            "no system role.*It takes no system prompt",
        ),
        (
            TURNS.replace("m.content", "m.content[:20 if m.role == 'system' else 9999]"),
            "leaves the system prompt, or a part",
        ),
        (TURNS.replace("m.content", "m.content.split('#')[0]"), "leaves the system prompt, or a"),
    ],
    ids=["other-roles", "last-message", "refused", "beginning", "up-to-a-sign"],
)
def test_a_system_prompt_that_the_template_drops_is_refused_with_the_fix(text, message):
    with pytest.raises(ValueError, match=rf"{message}.*data\.question_template.*correct it"):
        template_of(text).check_system_prompt(SYSTEM)


def test_a_question_that_is_lost_beside_a_system_prompt_is_refused():
    with pytest.raises(ValueError, match="the user's text out of the prompt beside a system"):
        template_of("Q{{ messages[0].content }}A").check_system_prompt(SYSTEM)


@pytest.mark.parametrize("text", [TURNS + OPENING, INSTRUCT])
def test_a_template_that_shows_both_texts_passes(text):
    template_of(text).check_system_prompt(SYSTEM)


def test_a_template_that_cuts_long_questions_is_refused():
    with pytest.raises(ValueError, match="leaves the end of a user's text of 40.. characters out"):
        template_of("{% for m in messages %}{{ m.content | truncate(1000) }}{% endfor %}")


@pytest.mark.parametrize(
    "text, header",
    [
        (TURNS, "<|assistant|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "assistant: "),
        (
            "{% for m in messages %}{{ 'Q: ' if m.role == 'user' else '\\nA: ' }}"
            "{{ m.content }}{% endfor %}",
            "\nA: ",
        ),
    ],
    ids=["chatml", "names", "question-and-answer"],
)
def test_a_prompt_without_the_beginning_of_the_answer_is_refused_with_the_fix(text, header):
    with pytest.raises(ValueError, match="ignores add_generation_prompt: prompts end in") as error:
        template_of(text).check_generation_prompt()
    fix = str(error.value).split("append ")[1].removesuffix(" to it; correct it")
    mended = template_of(text + fix)
    assert mended.check_generation_prompt() == ""
    without = template_of(text).render(ASKED, add_generation_prompt=True)
    assert mended.render(ASKED, add_generation_prompt=True) == without + header


@pytest.mark.parametrize(
    "text",
    [
        TURNS + OPENING,
        TURNS + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
        INSTRUCT,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
    ids=["opening", "thinking", "instruct", "text-alone"],
)
def test_a_prompt_that_ends_where_the_answer_begins_passes(text):
    assert template_of(text).check_generation_prompt() == ""


def test_a_template_that_never_shows_an_answer_is_noted():
    note = template_of("Q{{ messages[0].content }}A").check_generation_prompt()
    assert "ignores add_generation_prompt: prompts end in" in note and "5508A'" in note


# --- conversations that go on


FOLLOWED = [{"role": "user", "content": "Again."}]
QWEN3 = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}" + OPENING
)
WITHOUT_THINKING = TURNS + "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (TURNS + OPENING, "<|end|><|user|>Again.<|end|><|assistant|>"),
        (INSTRUCT, "</s>[INST] Again. [/INST]"),
    ],
    ids=["turns", "instruct"],
)
def test_what_follows_a_turn_is_its_end_and_the_next_question(text, after):
    template = template_of(text)
    template.check_history("as_rendered")
    found = template.after_turn(ASKED, FOLLOWED, history="as_rendered")
    assert found == after
    turn = [*ASKED, {"role": "assistant", "content": "7"}]
    whole = template.render([*turn, *FOLLOWED], add_generation_prompt=True)
    assert whole.endswith(f"7{after}")
    # A later turn follows in the same way.
    again = template.after_turn([*turn, *FOLLOWED], FOLLOWED, history="as_rendered")
    assert again == after


@pytest.mark.parametrize(
    ("text", "how"),
    [(QWEN3, "<think> and </think> is left out"), (WITHOUT_THINKING, "becomes")],
    ids=["reasoning", "opening"],
)
def test_a_template_that_rewrites_turns_is_refused_unless_they_are_kept(text, how):
    template = template_of(text)
    with pytest.raises(ValueError, match=f"model.chat_template writes earlier .*{how}") as error:
        template.check_history("as_rendered")
    assert "set environment.history=keep" in str(error.value) and "correct it" in str(error.value)
    assert "or new_record to begin another sequence" in str(error.value)
    template.check_history("keep")
    template.check_history("new_record")
    after = template.after_turn(ASKED, FOLLOWED, history="keep")
    assert after.startswith("<|end|><|user|>Again.<|end|><|assistant|>")


def test_an_answer_that_a_template_writes_as_json_is_there():
    template = template_of(
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
        "<|end|>{% endfor %}" + OPENING
    )
    answer = {"role": "tool", "content": 'two "lines"\nof é\n'}
    after = template.after_turn(ASKED, [answer], history="as_rendered")
    assert after == '<|end|><|tool|>"two \\"lines\\"\\nof é\\n"<|end|><|assistant|>'
    template.check_shows([*ASKED, {"role": "assistant", "content": "?"}, answer])
    with pytest.raises(ValueError, match="leaves message 0 of role 'tool', 'four', out"):
        template_of(
            TURNS.replace("m.content", "'five' if m.role == 'tool' else m.content")
        ).check_shows([{"role": "tool", "content": "four"}])


def test_a_template_that_leaves_an_answer_of_the_environment_out_is_refused():
    template = template_of(
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}" + OPENING
    )
    with pytest.raises(ValueError, match="leaves a message of role 'tool', '42', out"):
        template.after_turn(ASKED, [{"role": "tool", "content": "42"}], history="keep")
