r"""Reads the number that a worked answer ends in, and nothing else.

Pure text in, exact value out; scoring lives in `scorers.py`. The rules, in the order applied:

1. An answer stands after a marker of four or more hashes, on its line or the next one that is not
   blank, or inside `\boxed{}`. The last of them counts, so neither a recited example nor a first
   guess decides. A marker that opens a heading in words (`#### Explanation`) or that nothing
   follows is no answer.
2. Around the number, markdown emphasis, backticks, quotes, brackets, LaTeX text commands, currency
   and a label such as `Final answer:` or `x =` are decoration. Of a line that begins with an
   equation, the right-hand side of the last `=` is meant.
3. A number has ASCII digits, an optional sign (also the Unicode minus signs), thousands groups of
   commas, or of one kind of space, a decimal part, an exponent, or the form `a/b` or `n a/b`.
   `thousand` to `trillion` multiply. Anything else that follows is a unit: `25%` is 25.
4. What reads as two numbers (`12 or 24`, `12, 24`, `3:30`, `2^10`, `1,23`) is no number. It still
   counts as the answer, and equals nothing.
5. Values are compared exactly, as fractions. Past `MAX_DIGITS` digits or that size of an exponent
   a text is no number, which bounds the time of every comparison.
"""

import collections
import dataclasses
import re
from fractions import Fraction

MAX_DIGITS = 1000

_MINUS_SIGNS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_SPACES = "\u00a0\u2007\u2009\u202f"
_TO_ASCII = str.maketrans(dict.fromkeys(_MINUS_SIGNS, "-") | {"\uff0b": "+"})

_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2 "),
        (r"\\(?:text|textbf|textit|mathbf|mathrm|mathit|textrm|mbox|boldsymbol|bm)\s*(?=\{)", " "),
        (r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])", " "),
        (r"\{,\}", ","),
        (r"(?<=[0-9])\\[,!](?=[0-9]{3})", ","),
        (r"\\[,!;: ]", " "),
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\(?:approx|sim)(?![A-Za-z])", "~"),
        (r"\\([$%#_&{}()\[\]])", r"\1"),
        # Two stars between digits are a power; anywhere else they are emphasis.
        (r"(?<=[0-9])\*\*(?=[0-9])", "^"),
        (r"\*\*|__|`", " "),
    ]
]

_CURRENCY = (
    r"(?:(?:US|CA|AU|NZ|HK)?[$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd\u20ba\u20aa]|Rs\.?"
    r"|(?:USD|EUR|GBP|INR|JPY|CNY|CAD|AUD)(?![A-Za-z]))"
)
_DIGITS = rf"""(?:[0-9]{{1,3}}(?:,[0-9]{{2,3}})*,[0-9]{{3}}(?![0-9])
    |[0-9]{{1,3}}(?:(?P<space>[ {_SPACES}])[0-9]{{3}}(?![0-9])(?:(?P=space)[0-9]{{3}}(?![0-9]))*)
    |[0-9]+)"""
# In no pattern do two loops over white space stand side by side: every way to share it would be
# tried, which takes minutes where a completion ends in blanks.
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s*(?:{_CURRENCY}\s*)?(?:(?P<inner>[+-])\s*)?
    (?P<whole>{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)
    (?P<exponent>[eE][+-]?[0-9]+)?
    (?:\s?/\s?(?P<denominator>[0-9]+)|\s(?P<over>[0-9]+)/(?P<under>[0-9]+))?
    """,
    re.VERBOSE,
)
_SCAN = re.compile(
    rf"(?<![0-9A-Za-z])(?<![0-9][.,:^])(?:[+-]?{_CURRENCY}?[+-]?)(?=\.?[0-9])", re.VERBOSE
)
_SCALE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE_WORD = re.compile(rf"[\s-]?({'|'.join(_SCALE)})(?![A-Za-z])", re.IGNORECASE)

_CLOSING = r"[\s*_'\")\]}\u00b0%]*"
# What follows a number and makes of the two something other than a number with a unit.
_GLUED = re.compile(r"[.,:]?\d|[\u00b2\u00b3\u00b9\u2070-\u2079]|[eE][+-]?\d")
_CALCULATION = re.compile(
    rf"{_CLOSING}(?:[-+*/^\u00d7\u00f7\u00b7=]|x(?=\s*\d))\s*(?:[(\[{{$]+\s*)?[-+]?\.?\d"
)
_ANOTHER = re.compile(
    rf"{_CLOSING}(?:(?:[,;|&~\u2192]|->|(?:or|and|to)\b)\s*)?(?:{_CURRENCY}\s*)?[-+]?\.?\d",
    re.IGNORECASE,
)
_EQUALS = re.compile(rf"{_CLOSING}(?:=|[-+*/^\u00d7\u00f7\u00b7x]\s*[\d(.]).*=(?P<right>[^=]*)$")

_DECORATION = re.compile(r"[\s*_'\"(\[{<>:=~\u2248|]*")
# A dollar sign is currency before a digit and a LaTeX delimiter before anything else.
_DELIMITER = re.compile(r"\$(?!\s*(?:[-+]\s*)?[0-9.])")
_LABEL = re.compile(
    r"(?:[A-Za-z ]{0,30}\b(?:answer|result|total)\b\s*(?:is\b|[:=])|[A-Za-z]\s*=)", re.IGNORECASE
)
# A marker and its text: the rest of the line, or of the next line that is not blank, up to another
# marker.
_MARKER = re.compile(r"#{4,}\s*(?P<text>(?:(?!\#{4})[^\r\n])*)")
_BOXED = re.compile(r"\\f?boxed\s*\{")


@dataclasses.dataclass(frozen=True)
class FinalAnswer:
    """The answer that a completion gives; `value` is None if that is not one number."""

    value: Fraction | None


def _clean(text: str) -> str:
    """Maps minus signs, LaTeX commands and emphasis to plain text."""
    text = text.translate(_TO_ASCII)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def _value(number: re.Match) -> Fraction | None:
    """The exact value of a match of `_NUMBER`, or None past the bounds or over zero."""
    if number["sign"] and number["inner"]:
        return None
    whole = re.sub(rf"[,{_SPACES} ]", "", number["whole"])
    parts = [whole, number["denominator"], number["over"], number["under"]]
    if any(part is not None and len(part) > MAX_DIGITS for part in parts):
        return None
    exponent = number["exponent"] or "e0"
    if len(exponent) > 6 or abs(int(exponent[1:])) > MAX_DIGITS:
        return None
    value = Fraction(whole) * Fraction(10) ** int(exponent[1:])
    over, under = number["over"] or "0", number["under"] or number["denominator"] or "1"
    if int(under) == 0:
        return None
    value = value / int(under) if number["denominator"] else value + Fraction(int(over), int(under))
    return -value if "-" in (number["sign"], number["inner"]) else value


def _read(text: str, start: int) -> tuple[Fraction | None, int] | None:
    """Reads the number at `start` of cleaned text: its value and end; None where none begins."""
    number = _NUMBER.match(text, start)
    if number is None:
        return None
    end = number.end()
    if _GLUED.match(text, end):
        return None, end
    value = _value(number)
    scale = _SCALE_WORD.match(text, end)
    if scale:
        end = scale.end()
        value = None if value is None else value * _SCALE[scale[1].lower()]
    return value, end


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


def _read_line(line: str) -> FinalAnswer | None:
    """Reads one line of cleaned text as an answer; None where it does not begin with a number."""
    line = _skip_decoration(line)
    read = _read(line, 0)
    if read is None:
        return None
    value, end = read
    equation = _EQUALS.match(line, end)
    if equation:
        return _read_line(equation["right"]) or FinalAnswer(None)
    if _CALCULATION.match(line, end) or _ANOTHER.match(line, end):
        return FinalAnswer(None)
    return FinalAnswer(value)


def parse_number(text: str) -> Fraction | None:
    """Reads a text that should be one number, such as a gold answer.

    Returns:
        The exact value, or None where the text is not one number by the rules above.
    """
    answer = _read_line(_clean(text.strip()))
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
        answer = _read_line(_clean(marker["text"]))
        if answer is not None:
            return answer
    if boxed is None:
        return None
    return _read_line(_clean(_boxed_content(text, boxed.end()))) or FinalAnswer(None)


def lenient_answer(text: str) -> FinalAnswer | None:
    """Returns the strict answer, or without a marker the last number anywhere in the text."""
    answer = strict_answer(text)
    if answer is not None:
        return answer
    text = _clean(text)
    last, covered = None, 0
    for found in _SCAN.finditer(text):
        if found.start() < covered:
            continue
        start = found.start()
        if text[start] in "+-" and re.search(r"[0-9)\]]\s*$", text[max(0, start - 8) : start]):
            start += 1  # an operator between two terms, not a sign
        read = _read(text, start)
        if read is not None:
            last, covered = FinalAnswer(read[0]), read[1]
    return last


def answer_text(text: str) -> str | None:
    """Returns the line after the last `####` without decoration around it, or None without one.

    For answers that are not numbers; the content is otherwise left as it is.
    """
    marker = _last(_MARKER, text)
    return marker["text"].strip().strip("*`").strip() if marker else None


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
    return re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", after.strip())
