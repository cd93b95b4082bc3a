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
    SCALES,
    UNITS,
    literal_value,
)

NUMERALS = (
    "0 5 7 12 57 101 007 250 1000 1,000 12,345 1,00,000 0,500 1,23 1,2345 1.5 .5 3.50 1.2.3 5."
)
NUMERALS += " 0.25 1e3 5e-2 2E3 1.e3 0x1F 1{,}000 1\\,000 12\\,345 ５７ １，０００ 3٣ 1e 99.9"
FRACTIONS = (
    "½ ¾ ⅛ ⅞ 1/2 3/4 7/8 7⁄8 1∕2 /2 ⁄8 1/0 9/4 ⁷⁄₈ \\frac12 \\frac{1}2 \\frac1{2} \\frac{3}{4}"
)
FRACTIONS += " \\dfrac{1}{2} \\tfrac34 \\frac{\\mathrm{1,000}}{2} \\frac{\\text{3}}{\\textbf{4}}"
FRACTIONS += " \\frac{x}{2} \\frac{1}{2.5} \\frac{-1}{2} \\frac{1+2}{3} \\frac{12}{0}"
SCALED = [*SCALES, "k", "K", "M", "m", "B", "T", "bn", "mn", "mio", "Millionen", "mil", "万", "億"]
SCALED += ["lac", "cr", "bil", "thou", "juta", "milyon", "만", "백만", "مليون", "triệu", "duizend"]
SCALED += ["hundredths", "thirds", "half", "quarters", "score", "-million", "thousand million"]
SCRIPTS = "² ³ ₂ ₁₀ ⁻¹ ⁿ ^2 ^{2} _2 _{2} _{10} ^n **2 ^\\circ ^{\\circ} % \\% ° ' \" + - π x n i e"
SCRIPTS += " \\pi \\sqrt{2} \\cdot \\times … ... ⃣ 𝟓 ① Ⅷ ٣ (x) (3) [3] \\overline{3} ^* _b"
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
GLUE = ["", "", "", " ", " ", " ", "  ", "\u00a0"]
ALPHABET = "0123456789.,/½²₂-{}^_ \u200b\u2060"


def draw_answer(rng: random.Random) -> tuple[str, bool]:
    """An answer as it may stand after a marker, and whether it may list or calculate."""
    kinds = [FRACTIONS.split(), SCALED, SCRIPTS.split(), COMPOUNDS, UNITS, UNITS, LATEX_UNITS]
    parts = [rng.choice(["", "", "", "", "", "**", "`", "(", "~", "$", *LABELS])]
    parts += [rng.choice(["", "", "", "", "-", "−", "- ", "+", "–"])]
    parts += [rng.choice(["", "", "", "$", "\\$", "€", "\\text{\\$}", "£ "])]
    parts += [rng.choice(NUMERALS.split() if rng.random() < 0.9 else FRACTIONS.split())]
    extra = rng.choice([0, 1, 1, 1, 2, 2, 3])
    for _ in range(extra):
        part = rng.choice(rng.choice(kinds))
        # Two words that run together are a word that is on no list.
        joined = part[:1].isalpha() and parts[-1][-1:].isalpha()
        parts += [" " if joined else rng.choice(GLUE), part]
    lists = (
        extra > 1
        or parts[3] in ("1e", "0x1F", "⁷⁄₈")
        or parts[-1] in ("(3)", "[3]", "\\frac{-1}{2}")
    )
    if rng.random() < 0.1:
        lists = True
        parts += [
            rng.choice(LISTED[: 11 if extra == 0 else 9]),
            rng.choice(GLUE),
            rng.choice(["", *UNITS]),
        ]
    text = "".join(parts)
    if rng.random() < 0.15:
        # At numbers only: what comes of a change within a word is on no list.
        place = rng.randrange(len(text) + 1)
        around = text[max(0, place - 1) : place + 1]
        if set(around) & set("0123456789.,½") and "\\" not in around:
            gone = rng.randrange(2) * (text[place : place + 1] in "0123456789.,/½{}^_")
            text, lists = text[:place] + rng.choice(ALPHABET) + text[place + gone :], True
    if rng.random() < 0.1:
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(INVISIBLE) + text[place:]
    end = rng.choice(["", "", "", ".", "**", "$", ")", "!", *ASIDES])
    text, lists = text + end, lists or end in ASIDES
    if rng.random() < 0.03:
        text = text.translate({ord(digit): 0xFEE0 + ord(digit) for digit in "0123456789"})
    return text, lists


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
        finals = {
            f"1 + 1 = 2\n#### {answer}": strict_answer,
            f"\\boxed{{{answer}}}.": strict_answer,
        }
        if not lists:  # of a list or a calculation, `lenient` takes the last number
            finals[f"So it is {answer}"] = lenient_answer
        for text, reader in finals.items():
            final = reader(text)
            value = final.value if final else None
            if value not in (None, right):
                wrong.append((text, str(value), str(right)))
            read += value is not None and reader is strict_answer
        possible += 2 * (right is not None)
    return {"answers": count, "with_value": possible, "read": read, "wrong": wrong}


if __name__ == "__main__":
    result = compare(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for text, value, right in result["wrong"][:30]:
        print(f"{text!r} is read as {value}, but is {right}")
    print({**result, "wrong": len(result["wrong"])})
    sys.exit(bool(result["wrong"]))
