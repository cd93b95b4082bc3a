"""A chat template: messages to text, the same text in every process of a run.

Beside the messages a template may read the clock, which here stands still at one moment of the run.
What differs from one process to the next is refused: random numbers, and addresses of objects.
"""

import contextlib
import copy
import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jinja2
import jinja2.meta
from transformers.utils.chat_template_utils import _compile_jinja_template

Messages = Sequence[Mapping[str, Any]]
History = Literal["as_rendered", "keep", "new_record"]
"""What a turn continues where earlier turns are written in another way than they were sampled."""

CLOCK = "strftime_now"
"""The function by which templates ask for the time."""
_QUESTION, _QUESTION_END = "tandem-question-7391", "tandem-end-5508"
_LONG_QUESTION = f"{_QUESTION} {'and so on ' * 400}{_QUESTION_END}"
_ANSWER = "tandem-answer-2264"
_REASON = "tandem-reason-9017"
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What the expressions of a template may raise; its sandbox bounds ranges by an OverflowError."""
_PRINTABLE = (str, int, float, type(None), list, tuple, Mapping, jinja2.Undefined)
_SHOWN = 60
"""Characters of a text that a message shows."""
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """One template with what it may read.

    Attributes:
        text: its source.
        reads_clock: whether a text that was rendered so far depends on the moment.
        tools: JSON schemas that it offers where a conversation names none.
        name: what messages call it.
        fix: how the user replaces it, for messages.
        marks_turns: whether it marks what the assistant writes with `{% generation %}`.
        reads: names that it takes from outside: messages, special tokens, arguments.
    """

    def __init__(
        self,
        text: str,
        variables: Mapping[str, str],
        *,
        name: str,
        fix: str,
        moment: datetime.datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        """Compiles the template.

        Args:
            variables: what the template may name, such as `bos_token`.
            name: what messages call it.
            fix: how the user replaces it, for messages.
            moment: the time that it reads, with its time zone; None is when this is made.
            arguments: further values by name, such as `enable_thinking`.
            tools: JSON schemas of the functions that it offers where a conversation names none.

        Raises:
            ValueError: if it is no Jinja, does not render, or leaves the user's text out.
        """
        self.text = text
        self.name = name
        self.fix = fix
        self.marks_turns = _MARK.search(text) is not None
        try:
            self._compiled = _compiled(text)
        except _RENDER_ERRORS as error:
            raise ValueError(f"{name} does not render: {error}; {fix}") from error
        clock = clock_of(moment or datetime.datetime.now().astimezone())
        self.reads_clock = False

        def read_clock(format: str) -> str:
            self.reads_clock = True
            return clock(format)

        self._variables = {**variables, CLOCK: read_clock}
        self._arguments = dict(arguments or {})
        self.tools = tuple(tools)
        self.reads = jinja2.meta.find_undeclared_variables(self._compiled.environment.parse(text))
        self._check_shows_the_user([])

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a conversation.

        Args:
            add_generation_prompt: whether it ends ready for the assistant's turn.
            tools: JSON schemas that it offers; none takes those of the template.

        Raises:
            ValueError: if the template refuses the messages.
        """
        with self._rendering(messages):
            return self._compiled.render(self._context(messages, tools, add_generation_prompt))

    def render_marked(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where what is in `{% generation %}` begins and ends.

        Raises:
            ValueError: if the template refuses the messages.
        """
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        environment: Any = self._compiled.environment
        with self._rendering(messages), environment.activate_tracker(blocks, spans):
            # One by one: a mark counts the characters before it.
            for block in self._compiled.generate(self._context(messages, tools, False)):
                blocks.append(block)
        return "".join(blocks), spans

    def _context(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> dict[str, Any]:
        """What the template reads; None as transformers has it for no tools and no documents."""
        return {
            **self._variables,
            **self._arguments,
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools or self.tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    @contextlib.contextmanager
    def _rendering(self, messages: Messages) -> Iterator[None]:
        """Makes whatever the template raises a ValueError that names the messages."""
        try:
            yield
        except _RENDER_ERRORS as error:
            raise ValueError(
                f"{self.name} does not render "
                f"{[message.get('role') for message in messages]}: "
                f"{str(error) or type(error).__name__}; {self.fix}"
            ) from error

    def after_answer(self) -> str:
        """What the template writes after an assistant's turn; empty where it shows no such turn."""
        return self._around_answer()[1]

    def after_turn(self, messages: Messages, following: Messages, *, history: History) -> str:
        """What the template writes after a turn of the assistant: its end, the messages that follow
        it, and the beginning of the next turn.

        It does not depend on what the assistant said, which is left out.

        Args:
            messages: up to that turn; earlier turns of the assistant may have any text.
            following: messages of other roles; at least one.
            history: `as_rendered` checks that the conversation before the turn is written as it was
                when the turn was asked for.

        Raises:
            ValueError: if the template refuses the messages, leaves one out, or rewrites what was
                there.
        """
        answered = [*messages, {"role": "assistant", "content": _ANSWER}, *following]
        text = self.render(answered, add_generation_prompt=True)
        before, found, after = text.rpartition(_ANSWER)
        if not found:
            raise ValueError(f"{self.name} leaves a turn of the assistant out: {self.fix}")
        for message in following:
            if not _shows(after, message["content"]):
                raise ValueError(
                    f"{self.name} leaves a message of role {message['role']!r}, "
                    f"{message['content'][:_SHOWN]!r}, out of the conversation, or a part of it: "
                    f"{self.fix}"
                )
        if history == "as_rendered":
            prompt = self.render(messages, add_generation_prompt=True)
            if not before.startswith(prompt) or before.removeprefix(prompt).strip():
                raise ValueError(self._rewrites(f"{_tail(prompt)!r} becomes {_tail(before)!r}"))
        return after

    def check_history(self, history: History) -> None:
        """Checks that a conversation of several turns can go on from the tokens that were sampled.

        Raises:
            ValueError: naming the template and the choice, if it writes an earlier turn of the
                assistant in another way than it was sampled.
        """
        followed = [{"role": "user", "content": _QUESTION_END}]
        self.after_turn(_asked([]), followed, history=history)
        if history != "as_rendered":
            return
        reasoned = {"role": "assistant", "content": f"<think>\n{_REASON}\n</think>\n\n{_ANSWER}"}
        text = self.render([*_asked([]), reasoned, *followed], add_generation_prompt=True)
        if _REASON not in text:
            raise ValueError(self._rewrites("what is between <think> and </think> is left out"))

    def _rewrites(self, how: str) -> str:
        return (
            f"{self.name} writes earlier turns of the assistant in another way than they were "
            f"sampled when others follow ({how}), so that a turn would not continue what the "
            "template writes: set environment.history=keep to go on from exactly the tokens that "
            "were sampled, or new_record to begin another sequence of the episode with what the "
            f"template writes, or {self.fix}"
        )

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "ChatTemplate":
        """The same template, which offers the tools of an environment.

        Args:
            tools: their JSON schemas; none leaves those that it has.

        Raises:
            ValueError: if it does not read tools, or does not render with them.
        """
        if not tools:
            return self
        self.check_takes_tools("tools of the environment")
        found = copy.copy(self)
        found.tools = tuple(tools)
        found._check_shows_the_user([])
        return found

    def check_arguments(self) -> None:
        """Checks that the template reads every argument, and the tools if there are some.

        Raises:
            ValueError: naming the argument and what the template reads.
        """
        own = {*self._variables, "messages", "tools", "documents", "add_generation_prompt"}
        readable = ", ".join(sorted(self.reads - own)) or "none"
        for name in self._arguments:
            if name in own:
                raise ValueError(
                    f"data.template_args.{name}: {name} is set by the program, not by an argument: "
                    "leave it out"
                )
            if name not in self.reads:
                raise ValueError(
                    f"data.template_args.{name}: {self.name} does not read {name}, of further "
                    f"arguments it reads: {readable}; correct the name, or leave it out"
                )
        if self.tools:
            self.check_takes_tools("data.tools")

    def check_takes_tools(self, which: str) -> None:
        """Checks that the template reads tools.

        Args:
            which: what messages call them.

        Raises:
            ValueError: if it does not.
        """
        if "tools" not in self.reads:
            raise ValueError(
                f"{which}: {self.name} does not read tools, so that the model would not know of "
                f"them: leave them out, or {self.fix}"
            )

    def check_system_prompt(self, system_prompt: str) -> None:
        """Checks that the whole system prompt reaches the prompt, and the user's text beside it.

        Raises:
            ValueError: if it does not.
        """
        fix = f"write the instruction into the question (data.question_template), or {self.fix}"
        system = [{"role": "system", "content": system_prompt}]
        try:
            text = self.render([*system, *_asked([])], add_generation_prompt=True)
        except ValueError as error:
            raise ValueError(f"{error}. It takes no system prompt: {fix}") from error
        if system_prompt.strip() not in text:
            raise ValueError(
                f"{self.name} leaves the system prompt, or a part of it, out of the prompt: {fix}"
            )
        self._check_shows_the_user(system)

    def check_shows(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Checks that every message reaches the prompt: the text of all but the assistant's, and
        the names of the functions that it calls.

        Templates leave a part of an earlier answer out on purpose, such as its reasoning.

        Raises:
            ValueError: naming the message that does not.
        """
        text = self.render(messages, add_generation_prompt=True, tools=tools)
        for place, message in enumerate(messages):
            role, content = message["role"], message["content"].strip()
            needed = [content] if role != "assistant" else _called_names(message)
            for lost in (one for one in needed if not _shows(text, one)):
                raise ValueError(
                    f"{self.name} leaves message {place} of role {role!r}, {lost[:_SHOWN]!r}, out "
                    f"of the prompt, or a part of it: remove such messages from the data, or "
                    f"{self.fix}"
                )

    def check_generation_prompt(self) -> str:
        """Checks that a prompt ends where the assistant's text begins.

        Some templates need no `add_generation_prompt`, since the user's turn ends with what opens
        the assistant's, as `[/INST]` does.

        Returns:
            what cannot be known of this template; empty where all is well.

        Raises:
            ValueError: if a prompt lacks what the template writes in front of an answer.
        """
        prompt = self.render(_asked([]), add_generation_prompt=True)
        if prompt != self.render(_asked([]), add_generation_prompt=False):
            return ""
        before, _ = self._around_answer()
        ends = f"prompts end in {_tail(prompt)!r}"
        if not before.startswith(prompt.rstrip()):
            return (
                f"{self.name} ignores add_generation_prompt: {ends}; if the model expects the "
                f"beginning of an assistant's turn there, {self.fix}"
            )
        header = before.removeprefix(prompt if before.startswith(prompt) else prompt.rstrip())
        if not header.strip():
            return ""
        raise ValueError(
            f"{self.name} ignores add_generation_prompt: {ends}, without the {header!r} that "
            "begins an assistant's turn: append {% if add_generation_prompt %}{{ "
            f"{header!r} }}}}{{% endif %}} to it; {self.fix}"
        )

    def _around_answer(self) -> tuple[str, str]:
        """What stands before and after the assistant's text; empty where that is not shown."""
        turns = [*_asked([]), {"role": "assistant", "content": _ANSWER}]
        text = self.render(turns, add_generation_prompt=False)
        before, found, after = text.rpartition(_ANSWER)
        return (before, after) if found else ("", "")

    def _check_shows_the_user(self, before: Messages) -> None:
        """Without the user's text every prompt would be the same."""
        text = self.render(_asked(before), add_generation_prompt=True)
        if _QUESTION in text and _QUESTION_END in text:
            return
        shown = repr(self.text[:_SHOWN]) + ("..." if len(self.text) > _SHOWN else "")
        if _QUESTION in text:
            raise ValueError(
                f"{self.name} leaves the end of a user's text of {len(_LONG_QUESTION)} characters "
                f"out of the prompt: {shown} must render all of messages[i]['content']; {self.fix}"
            )
        beside = " beside a system prompt" if before else ""
        hint = "" if "{" in self.text else "; it must be the text of a template, not a path"
        raise ValueError(
            f"{self.name} leaves the user's text out of the prompt{beside}: {shown} must render "
            f"messages[i]['content']{hint}; {self.fix}"
        )


def _shows(text: str, content: str) -> bool:
    """Whether a text has this content, as it is or as JSON: Llama's templates write what tools
    answered so.
    """
    content = content.strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _called_names(message: Mapping[str, Any]) -> list[str]:
    """Names of the functions that a message of the assistant calls, in the form of OpenAI's API."""
    calls = message.get("tool_calls") or ()
    functions = [one.get("function", one) for one in calls if isinstance(one, Mapping)]
    names = [one.get("name") for one in functions if isinstance(one, Mapping)]
    return [name for name in names if isinstance(name, str)]


def _compiled(text: str) -> jinja2.Template:
    """The template as transformers compiles it, without what differs between processes."""
    environment = _compile_jinja_template(text).environment.overlay(finalize=_printable)
    environment.filters = environment.filters | {"random": _refused("random")}
    environment.globals = environment.globals | {"lipsum": _refused("lipsum")}
    return environment.from_string(text)


def _refused(name: str) -> Callable[..., str]:
    def draw(*arguments: object, **named: object) -> str:
        raise jinja2.TemplateRuntimeError(
            f"it draws random numbers by `{name}`, but a prompt must be the same in every process "
            "and after a resume"
        )

    return draw


def _printable(value: Any) -> Any:
    """A value as it came, if its text is the same in every process."""
    if not isinstance(value, _PRINTABLE):
        raise jinja2.TemplateRuntimeError(
            f"it prints a {type(value).__name__}, whose text differs from process to process"
        )
    return value


def clock_of(moment: datetime.datetime) -> Callable[[str], str]:
    """The `strftime_now` of a template, at one moment.

    It writes what transformers would have written at that moment and place, whatever time zone the
    process is in.

    Args:
        moment: with its time zone.
    """
    local = moment.replace(tzinfo=None)
    epoch_s = str(int(moment.timestamp()))

    def strftime_now(format: str) -> str:
        # The C library reads %s, seconds since 1970, in the time zone of the process.
        absolute = re.sub("%([%s])", lambda m: epoch_s if m[1] == "s" else m[0], format)
        return local.strftime(absolute)

    return strftime_now


def _asked(before: Messages) -> list[Mapping[str, str]]:
    return [*before, {"role": "user", "content": _LONG_QUESTION}]


def _tail(text: str) -> str:
    return text[-_SHOWN // 2 :]
