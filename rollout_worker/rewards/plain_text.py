r"""Turns the spellings of one number in Unicode and LaTeX into one plain spelling.

Pure text in, text out. `5½`, `5\frac12` and `5\dfrac{1}{2}` become `5 1/2`, a typographic minus
becomes `-`, digits of full width become ASCII digits, and the commands that only change how a text
looks are dropped. What is not known to change the looks only stays as it is, so that the reader of
numbers sees it and refuses: a LaTeX command with its backslash, a subscript or superscript, an
invisible character between two digits.
"""

import re
import unicodedata

_MINUS_SIGNS = "\u2010\u2011\u2012\u2013\u2212\ufe63"
_SOLIDUSES = "\u2044\u2215"
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: " "}
_TO_ASCII = _FULL_WIDTH | str.maketrans(
    dict.fromkeys(_MINUS_SIGNS, "-") | dict.fromkeys(_SOLIDUSES, "/")
)

# Marks that turn the direction of writing stay: `81` under one of them is shown as 18. So do the
# invisible signs that multiply, apply and list, but not the plus of `2\u2064\u00bd`.
_INVISIBLE = re.compile("[\u00ad\u061c\u200b-\u200f\u2060\u2064\ufe00-\ufe0f\ufeff]+")
_VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]|\u215f(?=[0-9])")
_BLANKS = re.compile(r"\s+")

_WRAPPER = (
    r"text|textbf|textit|textrm|textsf|texttt|textnormal|mathbf|mathrm|mathit|mathsf|mathtt|mbox"
    r"|boldsymbol|bm|emph|underline"
)
_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_NUMERATOR = rf"[+-]?{_INTEGER}(?:\.[0-9]+)?"
_FRACTION = (
    rf"\\[dtc]?frac\s?(?:\{{\s?({_NUMERATOR})\s?\}}|([0-9]))\s?(?:\{{\s?({_INTEGER})\s?\}}|([0-9]))"
)


def _latex_fraction(fraction: re.Match) -> str:
    numerator, denominator = fraction[1] or fraction[2], fraction[3] or fraction[4]
    return f" {numerator.replace(',', '')}/{denominator.replace(',', '')} "


# A tab stands for a gap that a wrapper or emphasis leaves: unlike a blank it groups no thousands.
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (rf"\\(?:{_WRAPPER})\s?(?=\{{)", "\t"),
        (r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])", "\t"),
        (r"\{,\}", ","),
        (r"(?<=[0-9])\\[,!](?=[0-9]{3})", ","),
        (r"\\[,!;: \t]", "\t"),
        (r"\^\s?\{?\s?\\circ(?![A-Za-z])\s?\}?", "\u00b0"),
        (r"\\cdot(?![A-Za-z])", "\u00b7"),
        (r"\\times(?![A-Za-z])", "\u00d7"),
        (r"\\(?:approx|sim)(?![A-Za-z])", "~"),
        (r"\s{2,}", "\t"),
        # One wrapper inside another leaves braces inside braces.
        *[(r"\{\s?\{([^{}]*)\}\s?\}", r"{\1}")] * 2,
        (_FRACTION, _latex_fraction),
        (r"(?<!\\)[{}]", "\t"),
        (r"\\([$%#_&{}()\[\]])", r"\1"),
    ]
]
_LATEX_SIGNS = frozenset("\\{}")
# Two stars between digits, in code or not, are a power; anywhere else they are emphasis, as are
# tags and the special tokens of a chat template. `<sup>` and `<sub>` are more than looks.
_POWER = re.compile(r"(?<=[0-9])[\s`]*\*\*[\s`]*(?=[0-9])|(?<=[A-Za-z)])\*\*(?=[0-9])")
_EMPHASIS = re.compile(r"\*\*|__|`|</?(?!su[bp])[A-Za-z]+/?>|<\|\w+\|>")


def _gap(blanks: re.Match) -> str:
    """One character for a run of blanks; a single blank stays what it is."""
    if "\n" in blanks[0] or "\r" in blanks[0]:
        return "\n"
    return blanks[0] if len(blanks[0]) == 1 else "\t"


def _without_invisible(invisible: re.Match) -> str:
    """Nothing, or one zero-width space where the run parts two digits."""
    around = invisible.string[invisible.start() - 1 : invisible.start()]
    around += invisible.string[invisible.end() : invisible.end() + 1]
    return "\u200b" if re.fullmatch("[0-9]{2}", around) else ""


def _vulgar_fraction(fraction: re.Match) -> str:
    spelled = unicodedata.normalize("NFKC", fraction[0]).translate(_TO_ASCII)
    after = fraction.string[fraction.end() : fraction.end() + 1]
    return f" {spelled} " if after.isdigit() else f" {spelled}"


def plain_text(text: str) -> str:
    """Returns the text in its plain spelling, in time linear in its length.

    Runs of blanks become one character, a line break if the run has one.
    """
    text = _INVISIBLE.sub(_without_invisible, text.translate(_TO_ASCII))
    text = _BLANKS.sub(_gap, _VULGAR_FRACTION.sub(_vulgar_fraction, text))
    if not _LATEX_SIGNS.isdisjoint(text):
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return _BLANKS.sub(_gap, _EMPHASIS.sub("\t", _POWER.sub("^", text)))
