r"""A second reader of answers, for the tests: literal, and of another design than the product's.

It shares no code and no pattern with the product. The product drops what it knows to be decoration
and refuses what it knows to be no unit; this one builds the tree of the LaTeX, walks it character
by character, and accepts only words from closed lists. What is on no list is no number, so any
value that the product reads from such a text is reported. `drawn_answers.py` draws the texts.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

INVISIBLE = "\u00ad\u061c\u200b\u200c\u200d\u200e\u200f\u2060\u2064\ufe00\ufe0f\ufeff"
DIGITS = "0123456789"
SPACES = "\u00a0\u2007\u2009\u202f"
BLANKS = " \t" + SPACES
MARKS = " *`)_$]\"'′″|"
PLAIN = dict.fromkeys("−–", "-") | dict.fromkeys("⁄∕", "/")
VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅗": "3/5"}
VULGAR |= {"⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅑": "1/9", "⅒": "1/10", "⅛": "1/8", "⅜": "3/8"}
VULGAR |= {"⅖": "2/5", "⅘": "4/5", "⅝": "5/8", "⅞": "7/8", "↉": "0/3"}
SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "thousands": 1000, "lakh": 10**5}
SCALES |= {"million": 10**6, "millions": 10**6, "crore": 10**7, "billion": 10**9}
SCALES |= {"trillion": 10**12, "bn": 10**9}
MONEY = {"k": 10**3, "K": 10**3, "m": 10**6, "M": 10**6, "mn": 10**6, "b": 10**9, "B": 10**9}
MONEY |= {"T": 10**12, "bn": 10**9, "mm": 10**6}
UNITS = ["apples", "dollars", "km", "km/h", "cm", "kg", "ft", "in", "hours", "minutes", "people"]
UNITS += ["m", "h", "s", "g", "L", "m²", "cm^2", "m^3", "个", "元", "mètres", "times", "points"]
UNITS += ["percent", "feet", "a day", "more", "left over", "lbs", "in total", "o'clock", "USD"]
UNITS += ["th"]
WORDS = [*UNITS, "boxes", "days", "over", "out of", "of", "cups", "oz", "cents", "and", "or", "to"]
WORDS += ["m2", "m3", "km2", "km3", "cm2", "cm3"]
ASIDES = [" in 3 boxes", " for 2 days", " (19+38=57)", ", since 3*19=57", ". That is 7 a week."]
LOOKS = ["text", "mathrm", "textbf", "mathbf", "textit", "mathsf", "texttt", "emph", "boldsymbol"]
LABELS = ["Answer: ", "Final answer: ", "The answer is ", "x = ", "Total = "]


class NotRead(Exception):
    """The text is not one number, or not known to be one."""


def tree(text: str) -> list:
    """The text as characters, commands (a backslash first) and groups (lists)."""
    stack: list[list] = [[]]
    place = 0
    while place < len(text):
        char = text[place]
        place += 1
        if char == "{":
            stack.append([])
        elif char == "}":
            if len(stack) == 1:
                raise NotRead
            group = stack.pop()
            stack[-1].append(group)
        elif char == "\\":
            start = place
            while place < len(text) and text[place].isascii() and text[place].isalpha():
                place += 1
            place += place == start
            stack[-1].append("\\" + text[start:place])
        else:
            stack[-1].append(char)
    if len(stack) > 1:
        raise NotRead
    return stack[0]


LEAVES: dict[str, str] = {
    "\\,": "\t",
    "\\ ": "\t",
    "\\%": "%",
    "\\$": "$",
    "\\_": "_",
    "\\circ": "°",
}
LEAVES |= {"\\times": "×", "\\cdot": "·"}
LEAVES |= dict.fromkeys(("\\" + look for look in LOOKS), "\t")
LEAVES |= dict.fromkeys(["\\;", "\\!", "\\left", "\\right", "\\displaystyle", "\\underline"], "\t")
LEAVES |= {"\\(": "(", "\\)": ")", "\\\\": "\t"}


def leaves(nodes: list[Any]) -> Iterator[Any]:
    """The characters of a tree in order; a fraction becomes ` a/b `, what only looks is dropped."""
    queue = list(nodes)
    while queue:
        node = queue.pop(0)
        if isinstance(node, list):
            # Digits after a group are not one numeral with those before it.
            yield from ["\t", *leaves(node), "\t"] if node != [","] else [","]
        elif node in ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac"):
            parts = [part for part in queue if part != " "][:2]
            over, under = (thousands("".join(leaves([part])).strip()) for part in parts)
            digits = over[1:] if over[:1] in ("-", "+") else over
            if not is_decimal(digits) or not under.isdecimal():
                raise NotRead
            while parts:
                parts.remove(queue.pop(0)) if queue[0] != " " else queue.pop(0)
            yield from f" {over}/{under} "
        elif len(node) > 1 and node not in LEAVES:
            raise NotRead
        else:
            yield LEAVES.get(node, node)


def is_decimal(text: str) -> bool:
    """Whether a text is digits, perhaps with a point and more digits."""
    whole, point, decimals = text.partition(".")
    return set(whole + decimals) <= set(DIGITS) and (decimals if point else whole) != ""


def shown(text: str) -> str:
    """The text as it is shown: without invisible characters, with plain signs and fractions."""
    out = ""
    text = text.replace("__", "\t").replace("`", "\t")
    for place, char in enumerate(text):
        if char in INVISIBLE:
            rest = text[place:].lstrip(INVISIBLE)
            if out[-1:].isdecimal() and rest[:1].isdecimal():
                raise NotRead
        elif char == "⅟":
            if not text[place + 1 :].lstrip(INVISIBLE)[:1].isdecimal():
                raise NotRead
            out += " 1/"
        elif "\uff01" <= char <= "\uff5e":
            out += chr(ord(char) - 0xFEE0)
        else:
            out += f" {VULGAR[char]} " if char in VULGAR else PLAIN.get(char, char)
    out = stars_as_powers(out)
    for tag in ("<b>", "</b>", "<i>", "</i>"):
        out = out.replace(tag, "\t")
    return thin_spaces_as_commas(out)


def stars_as_powers(text: str) -> str:
    """Writes `cm**2` and `5 ** 2` as `cm^2` and `5 ^ 2`; other pairs of stars only look."""
    before, *others = text.split("**")
    out = before
    for other in others:
        touches = before[-1:].isalpha() or before[-1:] == ")"
        is_power = touches and other[:1].isdecimal()
        is_power |= before.rstrip(BLANKS)[-1:].isdecimal() and other.lstrip(BLANKS)[:1].isdecimal()
        out += ("^" if is_power else "\t") + other
        before = other  # in `**5** **1/2**` one emphasis ends and another begins
    return out


def thin_spaces_as_commas(text: str) -> str:
    """Writes `1\\,000` as `1,000`."""
    first, *others = text.replace("\\!", "\\,").split("\\,")
    for other in others:
        groups = first[-1:].isdecimal() and other[:3].isdecimal() and len(other) >= 3
        first += ("," if groups else "\\,") + other
    return first


def thousands(whole: str) -> str:
    """The digits of a numeral with or without commas."""
    first, *groups = whole.split(",")
    if groups:
        western = all(len(group) == 3 for group in groups) and len(first) <= 3
        indian = all(len(group) == 2 for group in groups[:-1]) and len(groups[-1]) == 3
        if first[:1] in ("", "0") or not (western or (indian and len(first) <= 2)):
            raise NotRead
    return first + "".join(groups)


def numeral(text: str) -> tuple[Fraction, str, bool]:
    """The number at the start of a text, what follows it, and whether it has only digits."""
    rest = text.lstrip(DIGITS + ".,")
    body = text[: len(text) - len(rest)].rstrip(".,")
    rest = text[len(body) :]
    whole, point, decimals = body.partition(".")
    digits, plain = thousands(whole), not point
    # A blank groups thousands like a comma, one kind of blank in a numeral.
    blank, may_group = rest[:1], digits == whole and len(digits) <= 3 and digits[:1] != "0"
    while not point and may_group and blank and blank in " " + SPACES and rest[:1] == blank:
        group, after = rest[1:4], rest[4:]
        if len(group) < 3 or not group.isdecimal() or after[:1].isdecimal():
            break
        digits, rest, plain = digits + group, after, False
    if digits != whole.replace(",", "") and rest[:1] == "." and rest[1:2].isdecimal():
        rest = rest[1:]
        after = rest.lstrip(DIGITS)
        point, decimals, rest = ".", rest[: len(rest) - len(after)], after
    if (rest[:1] == "." and rest[1:2].isdecimal()) or not is_decimal(digits + point + decimals):
        raise NotRead
    value = Fraction(digits + point + decimals)
    if rest[:1] in ("e", "E"):
        after = rest[1:].lstrip(DIGITS) if rest[1:2].isdecimal() else rest[2:].lstrip(DIGITS)
        exponent = rest[1 : len(rest) - len(after)]
        if exponent[-1:].isdecimal() and exponent[0] in DIGITS + "-+":
            value, rest, plain = value * Fraction(10) ** int(exponent), after, False
    return value, rest, plain


def quantity(text: str) -> tuple[Fraction, str]:
    """The number with its fraction, and what follows."""
    value, rest, plain = numeral(text)
    tail = rest.lstrip(BLANKS)
    if tail[:1] == "/" and tail[1:].lstrip(BLANKS + "*")[:1].isdecimal():
        under, rest, plain = numeral(tail[1:].lstrip(BLANKS + "*"))
        if not plain or under == 0:
            raise NotRead
        return value / under, rest
    if tail[:1].isdecimal() and tail != rest:
        over, rest, integer = numeral(tail)
        if rest[:1] != "/" or not integer or not plain:
            raise NotRead
        under, rest, integer = numeral(rest[1:])
        if not integer or over >= under:
            raise NotRead
        return value + over / under, rest
    return value, rest


def word_of(text: str) -> tuple[str, str]:
    """The letters at the start of a text, and what follows them."""
    length = 0
    while text[length : length + 1].isalpha():
        length += 1
    return text[:length], text[length:]


def read_unit(text: str) -> None:
    """Raises NotRead unless a text is units from the list, then perhaps an aside."""
    text = text.replace("~", " ")  # a blank of LaTeX
    text = "".join(" " if char in BLANKS else char for char in text).replace("()", "")
    while "  " in text:
        text = text.replace("  ", " ")
    units = 0
    while not is_end(text, units):
        text = text.lstrip(MARKS)
        if text[:2] == "- " and units:
            text = text[2:]
            continue
        if text[0] in "-/" and len(word_of(text[1:].lstrip(" /`*"))[0]) > (
            text[0] == "-" and not units
        ):
            text = text[1:].lstrip(" `*")
        if text[0] == "^" and text[1:].lstrip(BLANKS)[:1] == "°":
            text = text[1:].lstrip(BLANKS)
        found = [unit for unit in WORDS if text.startswith(unit) and ends_at(text, len(unit))]
        if (
            text[0] in ",;%°"
            or (text[0] == "." and units)
            or opens_words(text, units)
            or (text[0] in "€£." and text[:2] != ".." and units == 0)
        ):
            text = text[1:]
        elif text.startswith("...") and units:
            text = text[3:]
        elif found:
            text = text[len(max(found, key=len)) :]
            power = text.lstrip(BLANKS).removeprefix("^").lstrip(BLANKS).removeprefix("-")
            if text.lstrip(BLANKS)[:1] in ("^", "²", "³") and power[:1] in tuple("1234²³"):
                text = power[1:]
            units += 1
        else:
            raise NotRead


def is_end(text: str, units: int) -> bool:
    """Whether what follows so many units is punctuation or an aside."""
    if text in (ASIDES if units else ASIDES[2:]):
        return True
    text = text.lstrip(MARKS)
    if not units and "".join(char for char in text if char not in MARKS)[:2] in ("..", ",.", ".,"):
        return False  # dots for what is left out
    if set(text) <= set(MARKS + "!,?." + "-" * units):
        return True
    if text.lstrip("!.").startswith(" That ") or text.lstrip(".,").startswith(" since 3"):
        return True
    aside = text.lstrip(". ")
    return aside[:1] == "(" and "=" in aside and set(aside[1:-1]) <= set("0123456789+=. ")


def opens_words(text: str, units: int) -> bool:
    """Whether a bracket opens that has words or marks in it, or dots after a unit."""
    inner = text[1:].lstrip(MARKS.replace(")", "!" + ".,;" * units))
    return text[0] == "(" and (inner[:1].isalpha() or inner[:1] == ")")


def ends_at(text: str, place: int) -> bool:
    """Whether no letter and no digit stands there."""
    return not text[place : place + 1].isalpha() and not text[place : place + 1].isdecimal()


def without_decoration(text: str) -> str:
    """The text from its number, sign or currency on."""
    while True:
        text = text.lstrip(BLANKS + "*`(_~\"'[")
        label = next((label for label in LABELS if text.startswith(label.rstrip())), None)
        if label:
            text = text[len(label.rstrip()) :]
        elif text[:1] == "$" and not is_decimal(text[1:].lstrip(BLANKS + "-+.")[:1]):
            text = text[1:]
        else:
            return text


def right_side(text: str) -> str | None:
    """What follows the last `=` of a calculation, or None if the text is none."""
    left, _, right = text.rpartition("=")
    scales = [word for scale in SCALES for word in (scale, scale.title(), scale.upper())]
    for word in sorted([*scales, *MONEY], key=len, reverse=True):
        left = left.replace(word, "")
    calculates = set(left) <= set("0123456789.,+-*/×÷·x()[]~_|$€£=°%^eE'\"" + BLANKS)
    # The bracket that opens at the start was dropped as decoration.
    opens, closes = left.find("("), left.find(")")
    is_balanced = left.count(")") - left.count("(") in (0, 1) and opens <= closes
    return right if left and calculates and is_balanced else None


def literal_value(text: str) -> Fraction | None:
    """The value of an answer that stands alone, or None if it is not one known number."""
    try:
        return plain_value("".join(leaves(tree(shown(text)))))
    except (NotRead, ValueError):
        return None


def plain_value(text: str) -> Fraction:
    """The value of an answer without LaTeX."""
    text = without_decoration(text)
    right = right_side(text)
    if right is not None:
        return plain_value(right)
    sign, money = "", False
    for _ in range(3):
        text = text.lstrip(BLANKS + "*`")
        if text[:1] in ("-", "+"):
            sign, text = sign + text[0], text[1:]
        elif text[:1] in ("$", "€", "£") and not money:
            money, text = True, text[1:]
    if len(sign) > 1:
        raise NotRead
    value, rest = scaled(*quantity(text), money=money)
    read_unit(rest)
    return -value if sign == "-" else value


def scaled(value: Fraction, rest: str, *, money: bool) -> tuple[Fraction, str]:
    """The number times the scales that follow it, and what follows them."""
    unscaled = rest
    word, after = word_of(rest.lstrip(BLANKS) if money else rest)
    if money and word in MONEY and after.lstrip(BLANKS)[:1] not in tuple("²³^°"):
        if "$" in after:
            raise NotRead
        value, rest = value * MONEY[word], after
    elif word == "k" and not money:
        value, rest = value * 1000, after
    while True:
        word, after = word_of(rest.lstrip(BLANKS).removeprefix("-"))
        if word.lower() not in SCALES or after[:1].isdecimal():
            break
        value, rest = value * SCALES[word.lower()], after
    if rest != unscaled and word_of(rest.lstrip(MARKS + BLANKS + "~-([$,.;!"))[0] in ("th", "ths"):
        raise NotRead  # the name of a fraction
    return value, rest
