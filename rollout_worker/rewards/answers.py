r"""Finds the answer that a completion ends in, and reads its number.

Pure text in, exact value out; scoring lives in `scorers.py`. The value of the answer or no number,
never another number. The rules, in the order applied:

1. An answer stands after a marker of four or more hashes, on its line or the next one that is not
   blank, or inside `\boxed{}`. The last of them counts, so neither a recited example nor a first
   guess decides. A marker that opens a heading in words (`#### Explanation`) or that nothing
   follows is no answer. A number in a box that is a part of something else, as in `-\boxed{5}`,
   `\boxed{5} million` and `\boxed{5}^2`, is no number.
2. Around the number, markdown emphasis, backticks, quotes, brackets, LaTeX text commands, currency
   and a label such as `Final answer:` or `x =` are decoration. Of a line that begins with an
   equation, the right-hand side of the last `=` is meant.
3. A number has ASCII digits (or those of full width), an optional sign (also the Unicode minus
   signs), thousands groups of commas, or of one kind of space, a decimal part, an exponent, or the
   form `a/b` or `n a/b`, also in LaTeX or as one character: `2\frac34`, `2\u00be`. `dozen` to
   `trillion` and the `k` of `5k` multiply, and of money also the letters of `$5M`.
4. Words that follow are its unit: `25%` and `25 apples in 3 boxes` are 25. What reads as two
   numbers (`12 or 24`, `3:30`, `5 ft 3 in`), as a calculation (`2^10`, `5x`, `5\sqrt{2}`), as a
   numeral of another base, or is not known to be a unit is no number. It still counts as the
   answer, and equals nothing. `quantity.py` has the details.
5. Values are compared exactly, as fractions. Past `MAX_DIGITS` digits or that size of an exponent
   a text is no number, which bounds the time of every comparison.
"""

import collections
import dataclasses
import re
from fractions import Fraction

from rollout_worker.rewards.plain_text import plain_text
from rollout_worker.rewards.quantity import (
    CLOSING,
    CURRENCY,
    NUMBER_WORD,
    ONE_LETTER_UNITS,
    SCALE_WORDS,
    is_unit,
    read_number,
)

_SCAN = re.compile(
    rf"(?<![\dA-Za-z])(?<![0-9][.,:^\u200b])(?:[+-]?(?:{CURRENCY}\s?)?[+-]?)(?=\.?[0-9])"
)
# What stands before the last number of a text and makes it a part of something else: an operator, a
# sign that is no bullet and no operator between two numbers, a larger
# unit, another number.
_PART = re.compile(
    rf"""\\[A-Za-z]+(?:[^A-Za-z=]|\b[A-Za-z]\b)*$
    |(?:[\^_\u221a\u215f/\u00d7\u00f7\u00b1\u00b7]|(?<=[\w)])\*
        |\b(?:minus|negative|plus|point|half|thirds?|quarters?|mod|base|times|over|twice|double|triple
            |not|log|ln|exp|sin|cos|tan|sqrt|power|per|out\sof
            |(?:divided|multiplied)\sby)(?:[ ]of)?)\W{{0,2}}$
    |\b[A-Za-z]\($|\d\W{{0,2}}e\W{{0,2}}$
    |\u200b$|\d\.?[\s~]{{1,2}}(?:and\s)?$
    |(?<![0-9)\]])(?<![0-9)\]]\s)(?<!^)[+-]\s?(?:{CURRENCY}\s?)?$
    |\d\.?[\s~]{{0,2}}(?:['\u2032\u00b0]|(?:f(?:ee|oo)?t|yards?|yd|miles?|mi|k?m|cm|lbs?|pounds?|stone|kg
        |gallons?|quarts?|pints?|cups?|tablespoons?|years?|months?|weeks?|days?|hours?|hrs?|h
        |minutes?|mins?|dollars?|bucks|euros?|degrees?|dozen|hundred|thousand|[mbtr]+illion)\b)
        \.?,?\s?(?:(?:and|plus)\s)?$
    """,
    re.IGNORECASE | re.VERBOSE,
)
_EQUALS = re.compile(
    rf"{CLOSING}(?:=|[-+*/^\u00d7\u00f7\u00b7x]\s?(?=[0-9(.]))"
    r"(?:[-+*/^\u00d7\u00f7\u00b7x0-9\s.$=]|,(?=[0-9])|\([-+*/\u00d7\u00f7\u00b7x0-9\s.]*\))*=(?P<right>[^=]*)$"
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
_LIST_NUMBER = re.compile(r"[0-9]+[.)]\s\S")

_DECORATION = re.compile(r"(?:_(?!\t)|[\s*'\"(\[:=~\u2248]|=>|<(?=[^<>]*>)|\|(?!\s?-))*")
# A dollar sign is currency before a digit and a LaTeX delimiter before anything else.
_DELIMITER = re.compile(r"\$(?!\s?(?:[-+]\s?)?[0-9.])")
_LABEL = re.compile(
    r"(?:[A-Za-z ]{0,30}\b(?:answer|result|total)\b\s?(?:is\b|[:=])|[A-Za-z]\s?=)", re.IGNORECASE
)
# A marker and its text: the rest of the line, or of the next line that is not blank, up to another
# marker.
_MARKER = re.compile(r"#{4,}\s*(?P<text>(?:(?!\#{4})[^\r\n])*)")
# A scale or an operation that follows a box: the number within is a part of the answer.
_BOX_GOES_ON = re.compile(
    rf"(?:[^\S\n]|[$\\,;~])*(?:(?:times|cdot|div)(?![A-Za-z])"
    rf"|(?!\^\s?\{{?\s?\\circ)[*/^_\u00d7\u00f7\u00b7]\s?[\d{{(\\]"
    rf"|(?:text|mathrm)?\s?\{{?\s?(?:{SCALE_WORDS}|bn)s?(?![^\W_]))",
    re.IGNORECASE,
)
# So it is where digits, a power, a fraction, a root or a letter that is no unit touch the box, ...
_TOUCHES_BOX = re.compile(
    rf"""\$?(?:(?:[.:eE]|\{{?,\}}?)?\d|[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209c\u2150-\u215e]
    |\\(?:[dtc]?frac|sqrt|pi)(?![A-Za-z])
    |(?:\\(?:text|mathrm)\s?\{{\s?)?(?![a{ONE_LETTER_UNITS}])[A-Za-z](?![^\W_]))""",
    re.VERBOSE,
)
# ... or where a sign, an operation, a root, a fraction or a digit stands before it.
_LEADS_TO_BOX = re.compile(
    r"""(?:(?:[-\u2212]|[=(]\s?[-\u2212]\s)(?:\\?\$)?
    |(?:[\^/\u221a\u00d7\u00f7\u00b10-9]|(?<=[^\W_]|[)}\]])_)\{?
    |\\(?:[dtc]?frac|sqrt|pm|cdot|times|div)\s?(?:\{[^{}]*\}|\[[^\[\]]*\])?\s?\{?)\Z""",
    re.VERBOSE,
)
_BOXED = re.compile(r"\\f?boxed\s*\{")


@dataclasses.dataclass(frozen=True)
class FinalAnswer:
    """The answer that a completion gives; `value` is None if that is not one number."""

    value: Fraction | None


def _skip_decoration(text: str) -> str:
    """Drops decoration and labels between a marker and its number."""
    while True:
        shorter = text
        for pattern in (_DECORATION, _DELIMITER, _LABEL):
            found = pattern.match(shorter)
            if found:
                shorter = shorter[found.end() :]
        if shorter == text:
            return text
        text = shorter


def _is_heading(line: str) -> bool:
    """Whether a line that does not begin with a number is a title rather than an answer."""
    start = re.search(r"[^\W_]|\\", line)
    words = re.compile(r"[AI]\s|[^\W\d_]{2,}").match(line, start.start()) if start else None
    return start is None or (words is not None and not NUMBER_WORD.fullmatch(words[0]))


def _read_line(line: str) -> FinalAnswer | None:
    """Reads one line of plain text as an answer; None for an empty line or a heading."""
    line = _skip_decoration(line)
    read = read_number(line, 0)
    if read is None:
        return None if _is_heading(line) else FinalAnswer(None)
    value, end = read
    equation = _EQUALS.match(line, end)
    if equation:
        return _read_line(equation["right"]) or FinalAnswer(None)
    if _LIST_NUMBER.match(line) or not is_unit(line, end):
        return FinalAnswer(None)
    return FinalAnswer(value)


def parse_number(text: str) -> Fraction | None:
    """Reads a text that should be one number, such as a gold answer.

    Returns:
        The exact value, or None where the text is not one number by the rules above.
    """
    answer = _read_line(plain_text(text.strip()))
    return None if answer is None else answer.value


def _last(pattern: re.Pattern, text: str) -> re.Match | None:
    """Returns the last match of a pattern in a text."""
    return collections.deque([None, *pattern.finditer(text)], maxlen=1)[0]


def _boxed_content(text: str, start: int) -> str:
    """Returns the text from `start` to the brace that closes it, or to the end."""
    depth = 1
    for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return text[start:]


def strict_answer(text: str) -> FinalAnswer | None:
    r"""Returns the answer after the last marker or in the last `\boxed{}`, or None without one."""
    boxed = _last(_BOXED, text)
    for marker in reversed([*_MARKER.finditer(text, boxed.end() if boxed else 0)]):
        answer = _read_line(plain_text(marker["text"]))
        if answer is not None:
            return answer
    if boxed is None:
        return None
    boxed_text = _boxed_content(text, boxed.end())
    end = boxed.end() + len(boxed_text) + 1
    before = text[max(0, boxed.start() - 40) : boxed.start()]
    if (
        _BOX_GOES_ON.match(text, end)
        or _TOUCHES_BOX.match(text, end)
        or _LEADS_TO_BOX.search(before)
    ):
        return FinalAnswer(None)
    content = plain_text(boxed_text).replace("\n", " ")
    if "!" in content:  # a factorial: nobody shouts in a formula
        return FinalAnswer(None)
    return _read_line(content) or FinalAnswer(None)


def lenient_answer(text: str) -> FinalAnswer | None:
    """Returns the strict answer, or without a marker the last number anywhere in the text."""
    answer = strict_answer(text)
    if answer is not None:
        return answer
    text = plain_text(text)
    last, covered = None, 0
    for found in _SCAN.finditer(text):
        if found.start() < covered:
            continue
        start = found.start()
        if text[start] in "+-" and re.search(r"[0-9)\]]\s?$", text[max(0, start - 8) : start]):
            start += 1  # an operator between two terms, not a sign
        read = read_number(text, start)
        if read is not None:
            last, covered = (start, *read), read[1]
    if last is None:
        return None
    start, value, end = last
    before = text[max(0, start - 40) : start].rpartition("\n")[2]
    if _PART.search(before) or not is_unit(text, end):
        return FinalAnswer(None)
    return FinalAnswer(value)


def answer_text(text: str) -> str | None:
    """Returns the line after the last `####` without decoration around it, or None without one.

    For answers that are not numbers; the content is otherwise left as it is.
    """
    marker = _last(_MARKER, text)
    return marker["text"].strip().strip("*`").strip() if marker else None


def final_text(text: str) -> str:
    """Returns the line on which an answer stands: after the last marker, from the last box on, or
    the last one.
    """
    boxed = _last(_BOXED, text)
    marker = _last(_MARKER, text)
    if marker and (boxed is None or marker.start() > boxed.start()):
        return marker["text"]
    return text[boxed.start() :].partition("\n")[0] if boxed else text.rstrip().rpartition("\n")[2]


def gold_answer(field: str) -> str:
    """Returns the reference answer that a source's answer field holds.

    A field with `####` is a GSM8K solution: the answer is what follows the last marker, without
    thousands commas; calculator notes in `<< >>` are never looked at. Any other field is the
    answer itself.

    Raises:
        ValueError: if nothing follows the marker.
    """
    _, marker, after = field.rpartition("####")
    if not marker:
        return field.strip()
    if not after.strip():
        raise ValueError(f"nothing follows the last #### of the answer {field[-80:]!r}")
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), after.strip())
