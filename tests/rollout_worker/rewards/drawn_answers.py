"""Answers drawn from the pieces that models write, read by the product and by `literal_reader.py`.

As a program it compares the two readers and prints where the product read another number:

    python -m tests.rollout_worker.rewards.drawn_answers COUNT [SEED]
"""

import random
import sys

from rollout_worker.rewards.answers import lenient_answer, strict_answer
from tests.rollout_worker.rewards.literal_reader import (
    ASIDES,
    INVISIBLE,
    LABELS,
    LOOKS,
    SCALES,
    UNITS,
    VULGAR,
    literal_value,
)

NUMERALS = (
    "0 5 7 12 57 101 007 250 1000 1,000 12,345 1,00,000 0,500 1,23 1,2345 1.5 .5 3.50 1.2.3 5."
)
NUMERALS += " 0.25 1e3 5e-2 2E3 1.e3 0x1F 1{,}000 1\\,000 12\\,345 ５７ １，０００ 3٣ 1e 99.9 5/"
NUMERALS += " 1\\!000 1\\,00 0.5e3 0.333... 0.3\u0305 12,345.67 1{,}000{,}000"
GROUPED = ["1 000", "12 345 678", "1\u2009000", "12\u202f345.5", "1\u00a0000", "1 00", "1 0000"]
GROUPED += ["1\\ 000", "1 000,5", "1\u2007000", "1\u2009000 000"]
FRACTIONS = [*VULGAR, "/2", "⁄8", "7⁄8", "1∕2", "⁷⁄₈", "⅟", "⅟2", "↉", "\\frac12", "\\tfrac34"]
PARTS = "1 2 3 4 7 8 9 12 45 0 1 2 3 4 1,000 1{,}000 1\\,000 1,00 2.5 -3 x 1+2 5² \\pi 3٣ 1e3"
SCALED = [*SCALES, "k", "K", "M", "m", "B", "T", "bn", "mn", "mio", "Millionen", "mil", "万", "億"]
SCALED += ["lac", "cr", "bil", "thou", "juta", "milyon", "만", "백만", "مليون", "triệu", "duizend"]
SCALED += ["hundredths", "thirds", "half", "quarters", "score", "-million", "thousand million"]
SCALED += ["Million", "THOUSAND", "Dozen", "hundred-thousand", "milliard", "per mille", "grand"]
SCALED += [
    "sextillion",
    "zillions",
    "googol",
    "million th",
    "-millionth",
    "Viertel",
    "et demi",
    "割",
]
SCRIPTS = "² ³ ₂ ₁₀ ⁻¹ ⁿ ^2 ^{2} _2 _{2} _{10} ^n **2 ^\\circ ^{\\circ} % \\% ° ' \" + - π x n i e"
SCRIPTS += " \\pi \\sqrt{2} \\cdot \\times … ... ⃣ 𝟓 ① Ⅷ ٣ (x) (3) [3] \\overline{3} ^* _b"
SCRIPTS += (
    " <sub>2</sub> <sup>2</sup> _{\\text{two}} _\\text{8} _{(2)} ^{\\text{th}} ^{-1} ^\\prime"
)
SCRIPTS += " ₈ ^{10} ^+ ₊ \\bar{3} \\dot{3} \\pm ! \\% ‰ ‱ \\degree .. ._.. ,.. '' ′ ″ | ~ \\\\"
COMPOUNDS = [
    " ft 3 in",
    "'3\"",
    " hours 30 minutes",
    " hours and 30 minutes",
    "h30m",
    " and a half",
]
COMPOUNDS += [
    " and 1/2",
    " and three quarters",
    " point five",
    " lbs 4 oz",
    " dollars, 30 cents",
    "%²",
]
COMPOUNDS += [" ft. 3 in.", " dozen and 4", " hundred and five", " squared", " mod 7", " (base 2)"]
COMPOUNDS += [" in binary", " feet and a quarter", " (mod 7)", " million three thousand"]
COMPOUNDS += ["\\text{ ft }3\\text{ in}", "'\\,3''", "^\\circ 30'", "°30′", " m 20 cm", " h 30"]
COMPOUNDS += ["\\text{ hours and }30\\text{ min}", " kg and \\frac12", " cups and ½", " plus ½"]
COMPOUNDS += [" th of 8", " percent of 20", " out of 6", " per 100 g", " over 3", " to the power 2"]
LISTED = [
    " or 6",
    ", 6",
    "-6",
    ":30",
    " x 3",
    "\\times 3",
    " + 2",
    " = 6",
    " to 7",
    "; 8",
    "/3 = 2",
]
LATEX_UNITS = ["\\text{ cm}", "\\text{ cm}^2", "\\,\\text{kg}", "\\text{ million}", "\\mathrm{km}"]
LATEX_UNITS += ["\\text{ thousand}", "\\,\\text{million}", "~\\text{km}", "\\;\\mathrm{bn}"]
LATEX_UNITS += [
    "\\text{k}",
    "\\ \\text{dozen}",
    "\\text{-million}",
    "\\textbf{ km}",
    "\\text{ m/s}",
]
AROUND = ["\\left({}\\right)", "<b>{}</b>", "**{}**", "{{{}}}", "${}$", "\\({}\\)", "`{}`", "*{}*"]
AROUND += ["\\displaystyle {}", "\\underline{{{}}}", "({})", "[{}]", "<i>{}</i>", "_{}_"]
AROUND += [f"\\{look}{{{{{{}}}}}}" for look in LOOKS]
GLUE = ["", "", "", " ", " ", " ", "  ", "\u00a0", "\u2009", "\u202f", "~", "\\ ", "\\,", "\\;"]
ALPHABET = "0123456789.,/½²₂-{}^_ \u200b\u2060\u2062\u202e"
# What may stand before a box and after it, and whether the number within is the whole answer.
LEADS = {"": True, "So $": True, "$x = ": True, "\\textbf{": True, "- ": True, "6 - 1 = ": True}
LEADS |= {"-": False, "= - ": False, "\\sqrt{": False, "\\frac{": False, "2^{": False, "7": False}
LEADS |= {"x = −$": False, "\\frac{1}{": False, "2\\cdot ": False, "\\log_": False, "\\pm ": False}
TAILS = {".": True, "$.": True, "\\]": True, "\\text{ cm}": True, " km.": True, "\n* 3 more": True}
TAILS |= {"$ in all": True, "\\%": True, " (19+38=57)": True, "^\\circ$": True, "m": True}
TAILS |= {"^2": False, "²": False, "½": False, "\\frac12": False, "_8": False, "\\text{k}": False}
TAILS |= {"k": False, ",000": False, "{,}000": False, ".5": False, "e3": False, "$ million": False}
TAILS |= {"\\times 10^3": False, "/2": False, "x": False, "\\pi": False, " thousand": False}
TAILS |= {"\\,\\text{billion}": False, "₂": False, "\\sqrt{2}": False, " \\cdot 3": False}


def draw_wrapped(rng: random.Random, text: str) -> str:
    """The text in a command, in brackets or in emphasis."""
    return rng.choice(AROUND).format(text)


def draw_fraction(rng: random.Random) -> str:
    """A fraction as one character, with a slash or in LaTeX, with wrappers within."""
    if rng.random() < 0.3:
        return rng.choice(FRACTIONS)
    over, under = rng.choice(PARTS.split()), rng.choice(PARTS.split())
    if rng.random() < 0.25:
        return over + rng.choice(["/", "/", " / ", "⁄", "∕", "\\/"]) + under
    command = rng.choice(["\\frac", "\\frac", "\\dfrac", "\\tfrac", "\\cfrac", "\\frac "])
    for part in (over, under):
        while rng.random() < 0.2:
            part = draw_wrapped(rng, part)
        bare = len(part) == 1 and rng.random() < 0.4
        command += part if bare else rng.choice(["{%s}", "{%s}", "{ %s }", " {%s}"]) % part
    return command


def draw_number(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return draw_fraction(rng)
    return rng.choice(GROUPED if kind < 0.3 else NUMERALS.split())


def draw_answer(rng: random.Random) -> tuple[str, bool]:
    """An answer as it may stand after a marker, and whether it may list or calculate."""
    kinds = [SCALED, SCRIPTS.split(), COMPOUNDS, UNITS, UNITS, LATEX_UNITS]
    parts = [rng.choice(["", "", "", "", "", "**", "`", "(", "~", "$", "\\text{", *LABELS])]
    parts += [rng.choice(["", "", "", "", "-", "−", "- ", "+", "–", "\\pm ", "- $"])]
    parts += [rng.choice(["", "", "", "$", "\\$", "€", "\\text{\\$}", "£ "])]
    parts += [draw_number(rng)]
    extra = rng.choice([0, 0, 1, 1, 1, 2, 2, 3])
    lists = extra > 1 or "frac" in parts[3] or bool(set(parts[3]) & set("/⁄∕"))
    lists = lists or parts[3] in ("1e", "1.e3", "0x1F", "0.333...", "0.3\u0305", "⅟", "1 000,5")
    if rng.random() < 0.15:
        place = rng.choice([2, 3])
        parts[place:] = [draw_wrapped(rng, "".join(parts[place:]))]
        lists = True
    for _ in range(extra):
        is_fraction = rng.random() < 0.2
        part = draw_fraction(rng) if is_fraction else rng.choice(rng.choice(kinds))
        if rng.random() < 0.1:
            part, lists = draw_wrapped(rng, part), True
        # Two words that run together are a word that is on no list.
        joined = part[:1].isalpha() and parts[-1][-1:].isalpha()
        parts += [" " if joined else rng.choice(GLUE), part]
        lists = lists or is_fraction
    lists = lists or parts[-1] in ("(3)", "[3]", " percent of 20", " th of 8")
    if parts[0] == "\\text{":
        parts += ["}"]
    if rng.random() < 0.1:
        lists = True
        parts += [
            rng.choice(LISTED[: 11 if extra == 0 else 9]),
            rng.choice(GLUE),
            rng.choice(["", *UNITS]),
        ]
    text, is_changed = changed(rng, "".join(parts))
    end = rng.choice(["", "", "", ".", "**", "$", ")", "!", *ASIDES])
    text, lists = text + end, lists or is_changed or end in ASIDES
    if rng.random() < 0.03:
        text = text.translate({ord(digit): 0xFEE0 + ord(digit) for digit in "0123456789"})
    return text, lists


def changed(rng: random.Random, text: str) -> tuple[str, bool]:
    """The text, at times with other or more characters, and whether that may change a number."""
    is_changed = False
    if rng.random() < 0.15:
        # At numbers only: what comes of a change within a word is on no list.
        place = rng.randrange(len(text) + 1)
        around = text[max(0, place - 1) : place + 1]
        if set(around) & set("0123456789.,½") and "\\" not in around:
            gone = rng.randrange(2) * (text[place : place + 1] in "0123456789.,/½{}^_")
            text, is_changed = text[:place] + rng.choice(ALPHABET) + text[place + gone :], True
    if rng.random() < 0.15:
        for _ in range(rng.choice([1, 1, 2])):
            numeric = [place for place, char in enumerate(text) if char.isnumeric()]
            place = rng.choice([rng.randrange(len(text) + 1), *numeric[:3]])
            text = text[:place] + rng.choice(INVISIBLE) + text[place:]
    return text, is_changed


def is_balanced(text: str) -> bool:
    depths = [0]
    for place, char in enumerate(text):
        step = {"{": 1, "}": -1}.get(char, 0) if text[place - 1 : place] != "\\" else 0
        depths.append(depths[-1] + step)
    return min(depths) == 0 == depths[-1]


def compare(count: int, seed: int) -> dict:
    """Reads `count` drawn answers with both readers.

    Returns the count of answers, of texts with a marker or a box that have a value, of those that
    the product read, and the `(text, value read, right value)` where it read another number.
    """
    rng = random.Random(seed)
    possible, read, wrong = 0, 0, []
    for _ in range(count):
        answer, lists = draw_answer(rng)
        while not is_balanced(answer):
            answer, lists = draw_answer(rng)
        right = literal_value(answer)
        lead, tail = "", "."
        if rng.random() < 0.3:
            lead, tail = rng.choice([*LEADS]), rng.choice([*TAILS])
        after = rng.choice(["", "", "\nThat is 3 more than 4."])
        texts = [
            (f"1 + 1 = 2\n#### {answer}{after}", strict_answer, right),
            (
                f"{lead}\\boxed{{{answer}}}{tail}",
                strict_answer,
                right if LEADS[lead] and TAILS[tail] else None,
            ),
        ]
        if not lists:  # of a list or a calculation, `lenient` takes the last number
            texts.append((f"So it is {answer}", lenient_answer, right))
        for text, reader, expected in texts:
            final = reader(text)
            value = final.value if final else None
            if value not in (None, expected):
                wrong.append((text, str(value), str(expected)))
            if reader is strict_answer:
                possible += expected is not None
                read += value is not None
    return {"answers": count, "with_value": possible, "read": read, "wrong": wrong}


if __name__ == "__main__":
    result = compare(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for text, value, right in result["wrong"][:30]:
        print(f"{text!r} is read as {value}, but is {right}")
    print({**result, "wrong": len(result["wrong"])})
    sys.exit(bool(result["wrong"]))
