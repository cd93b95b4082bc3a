r"""Reads one quantity: a number, a scale word, and a unit that leaves the number as it is.

Works on text that `plain_text.py` has put into its plain spelling; where in a completion the
quantity stands is the matter of `answers.py`. What follows a number is its unit only where it is
known to be nothing else: words, with signs such as `%`. Digits of any script, words for numbers,
operators, letters that may be variables and LaTeX commands make of the two something that is no
number: `5 ft 3 in`, `5 and a half`, `5x`, `5\sqrt{2}`, `5^n`, and `101` with a subscript 2.
"""

import re
import unicodedata
from fractions import Fraction

MAX_DIGITS = 1000

_SPACES = "\u00a0\u2007\u2009\u202f"
CURRENCY = (
    r"(?:(?:US|CA|AU|NZ|HK)?[$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd\u20ba\u20aa]|Rs\.?"
    r"|(?:USD|EUR|GBP|INR|JPY|CNY|CAD|AUD)(?![A-Za-z]))"
)
_DIGITS = rf"""(?:[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+(?![0-9])
    |[1-9][0-9]?(?:,[0-9]{{2}})+,[0-9]{{3}}(?![0-9])
    |[1-9][0-9]{{0,2}}(?P<space>[ {_SPACES}])[0-9]{{3}}(?![0-9])(?:(?P=space)[0-9]{{3}}(?![0-9]))*
    |[0-9]+)"""
_NUMBER = re.compile(
    rf"""(?P<sign>[+-]?)\s?(?P<currency>{CURRENCY}\s?)?(?:(?P<inner>[+-])\s?)?
    (?P<whole>{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)
    (?P<exponent>[eE][+-]?[0-9]+)?
    (?:\s?/\s?(?P<denominator>[0-9]+)|\s(?P<over>[0-9]+)/(?P<under>[0-9]+))?
    """,
    re.VERBOSE,
)

_SCALE = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
}
SCALE_WORDS = "|".join(_SCALE)
"""A pattern of the words that multiply, in lower case and without the s of a plural."""
_SCALE_WORD = re.compile(rf"\s?-?({SCALE_WORDS})s?(?![^\W_])", re.IGNORECASE)
# After an amount of money a single letter is a scale; elsewhere `5m` is a length.
_SCALE_OF_MONEY = {
    **dict.fromkeys(["k"], 10**3),
    **dict.fromkeys(["m", "mm", "mn", "mln"], 10**6),
    **dict.fromkeys(["b", "bn"], 10**9),
    **dict.fromkeys(["t", "tn"], 10**12),
}
_MONEY_SUFFIX = re.compile(
    rf"\s?({'|'.join(_SCALE_OF_MONEY)})(?![^\W_]|\s?[\^\u00b0])", re.IGNORECASE
)
_ONE_LETTER = re.compile(r"[^\W\d_](?![^\W_])")
_SUFFIX = re.compile(r"(k|\s?bn)(?![^\W_])")

# What follows a number without a gap and belongs to it.
_GLUED = re.compile(r"[.,:]?\d|[eE][+-]?\d|[xX][0-9A-Fa-f]|[bBoO]\d")

_MARKS = r"\s*_'\")\]|~%\u00b0\u00ba\u00a2\u2032\u2033\u2019\u201d"
CLOSING = f"[{_MARKS}]*"
# After a scale it makes the name of a fraction, with any script at its end: `5 million th\u00b2`.
_ORDINAL_ENDING = re.compile(r"(?:[^\w\n]|_)*ths?(?![^\W\d_\u00b2\u00b3])", re.IGNORECASE)
_AFTER_NUMBER = re.compile(rf">?{CLOSING}(?:{CURRENCY}{CLOSING})?")
# A point or an exponent without its digits, dots for digits left out, a subscript.
_NOT_A_UNIT = re.compile(
    rf"\.[^\W\d_]|[eE](?!UR\b|uros?\b|ggs?\b|ach\b)"
    rf"|[{_MARKS}.,;$]*\.\s?[.,]|{CLOSING}_[\w\t]|.*\bto\sthe\s(?:\w+\s)?power\b"
)
# A sentence ends where a capital letter or nothing follows, so `5 ft. 3 in.` is one.
_SENTENCE_END = re.compile(
    r"""(?<![.!?;])[.!?;]+[*_'\")\]$\u201d]*(?:\s?$|\s(?=[*_'\"(]{0,2}
    (?:[A-Z\u00c0-\u00de\u0410-\u042f][a-z\u00df-\u00ff\u0430-\u044f]|[AI]\s)))""",
    re.VERBOSE,
)
_ASIDE = re.compile(r"\s\([^()=]*=[^()]*\)|\b(?:because|since)\b.*")
_PLACE = re.compile(
    rf"(?<=[^\W\d_]{{2}})\s(?:in|for|at|on|after|within)\s(?:{CURRENCY}[0-9.]*[0-9]"
    r"|(?:[0-9]+|one|two|three|four|five|six|seven|eight|nine|ten)(?=\s[^\W\d_]{2}))(?![0-9./])"
)
_UNIT_POWER = re.compile(
    r"(?<=[A-Za-z])(?:[\u00b2\u00b3](?!\w)|\t?\^\s?-?[1-4](?![\w.]\w?))|(?<=[\s/cdk]m)[23]\b"
)
_UNIT_TOKEN = re.compile(
    r"""(?<=\s)(?:[A-Z][A-Za-z]+[2-4]|[A-Z][2-4][A-Z])\b            # CO2
    |(?P<word>[^\W\d_]+(?:['\u2019-][^\W\d_]+)*)
    |\s
    |(?<!\s)-(?=[^\W\d_]{2}) | /\s?(?=[^\W\d_]{2}|[hlms]\b)
    |(?<=[^\W\d_]{2}\s)[-\u2014](?=\s) | (?<=[^\W\d_]{2})[:\u2014]
    |(?<=\s)\((?=[\s*_'"~$|]*[^\W\d_]|\s?\))                        # a bracket of words
    |[,.;'"*_)\]|~$\u2019\u201c\u201d\u3001\u3002]
    |(?<=\s)[\u2705\u2713\u2714\u2728\u2b50\U0001f300-\U0001f4ae\U0001f4b0-\U0001f51e\U0001f524-\U0001faff]
    """,
    re.VERBOSE,
)
ONE_LETTER_UNITS = "cdghlmsCFJLNVW"
_GLUED_UNITS = re.compile(
    "am|pm|h|hrs?|min|sec|ms|[kcmn]m|mi|yd|ft|in|[km]?g|lbs?|oz|[mcd]l|kJ|kW|Hz|[mk]ph|[KMGT]B"
    "|USD|EUR|GBP|INR|JPY|CNY|CAD|AUD|usd|eur|gbp|st|nd|rd|th|pct|pts"
)
# `T-shirts` and `o'clock`, but no `x-y` and no `f'x`.
_JOINED_WORD = re.compile(
    r"[oO]['\u2019]clock|(?:[^\W\d_]-)?[^\W\d_]{2,}(?:['\u2019][^\W\d_]+|-[^\W\d_]{2,})*"
)
NUMBER_WORD = re.compile(
    rf"""(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve
    |(?:thir|four|fif|six|seven|eigh|nine)teen
    |twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety
    |half|halves|thirds?|quarters?
    |fifths?|eighths?|ninths?|twelfths?|(?:twen|thir|for|fif|six|seven|eigh|nine)tieths?
    |(?:{"|".join(_SCALE)})|score|gross|grand|minus|negative|plus|point)(?:s|ths?|fold)?""",
    re.IGNORECASE | re.VERBOSE,
)
# Scale words that are not in _SCALE, and names of fractions: short forms, prefixes, and words of
# other languages.
_OTHER_SCALE_TEXT = """
lac lacs cr crs arab kharab bil bln thou thsd hund bill trill myriad myriads tn mega giga tera milli
micro deci centi cien cientos ciento docena docenas decena decenas douzaine douzaines dizaine
dizaines centaine centaines millier milliers millar millares dezena dezenas centena centenas
milhar milhares mila migliaia centinaia dozzina dozzine decine duizend duizenden honderd
miljoen miljard tusen tusind hundre hundra hundrede miljon miljoner miljard miljarder tuhat
tuhatta tuhannen sata sataa miljoona miljoonaa miljardia ezer száz milliárd mii mie sute sută
tisoc hiljada hiljade tisuća stotina stotine tisíc tisíce sto stovky stó bin yüz milyon milyar
trilyon juta ribu ratus puluh miliar triliun nghin nghìn ngàn trăm triệu tỷ tỉ chục tá
χιλιάδες χίλια εκατό εκατομμύρια εκατομμύριο δισεκατομμύρια مليون ملايين مليار ألف الف آلاف
مئة مائة هزار میلیون میلیارد لاکھ کروڑ لک لك हजार लाख करोड़ सौ אלף מאה מיליון מיליארד พัน
หมื่น แสน ล้าน ร้อย
halb halbe halber halbes drittel viertel fünftel achtel zehntel hundertstel tausendstel demi demie
dixième dixièmes centième centièmes millième millièmes mezzo mezza meio meia medio décimo décimos
décima décimas половина половиной полтора 割 成
"""
_OTHER_SCALES = frozenset(_OTHER_SCALE_TEXT.split())
_KOREAN_SCALE = re.compile(
    "[\uc2ed\ubc31\ucc9c\ub9cc\uc5b5\uc870]+(?:\uc6d0|\uba85|\uac1c|\ub2ec\ub7ec)?"
)
# Words that take the number back, or go on with it.
_OBJECTIONS = {"not", "wrong", "incorrect", "repeating", "recurring", "twice", "thrice"}
# Scale words of other languages, bases, and operations in words.
_NO_UNIT = re.compile(
    r"""(?:(?:m|b|tr|quadr|quint)il+[ijh]*[o\u00f3\u00f5a\u00e3]\w*|\w*illi(?:on|ard)\w*|googol\w*
    |nth|mil|mille|mill|mln|mlrd|mrd|mio
    |mld|mn|bn|tsd|tausend\w*|hundert\w*|dutzend|tys\w*|\u0442\u044b\u0441\w*|\u043c\u043b\u043d
    |\u043c\u043b\u0440\u0434|\u043c\u0438\u043b+\u0438\w*|\w*[\u534a\u03c0\u03b8]\w*|base|binary
    |octal|hex|hexadecimal|mod|modulo|squared|cubed|divided|multiplied|factorial|pi|sqrt|root|log
    |ln|exp|sin|cos|tan|inf|infinity)""",
    re.IGNORECASE | re.VERBOSE,
)


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
    if number["denominator"] or number["over"]:
        # `5 100/3`, `5.5 1/2` and `5 3/2` are read in more than one way.
        over, under = int(number["over"] or 0), int(number["under"] or number["denominator"])
        is_mixed = number["over"] is not None
        if under == 0 or number["space"]:
            return None
        if is_mixed and (over >= under or number["exponent"] or "." in whole):
            return None
        value = value + Fraction(over, under) if is_mixed else value / under
    return -value if "-" in (number["sign"], number["inner"]) else value


def read_number(text: str, start: int) -> tuple[Fraction | None, int] | None:
    """Reads the number at `start` and its scale: its value and end; None where none begins.

    The value is None where the number cannot be read, as in `1.2.3` or past `MAX_DIGITS`.
    """
    number = _NUMBER.match(text, start)
    if number is None:
        return None
    end = number.end()
    if _GLUED.match(text, end):
        return None, end
    value = _value(number)
    if number["currency"]:
        suffix = _MONEY_SUFFIX.match(text, end)
    else:
        is_fraction = number["denominator"] or number["over"]
        suffix = None if is_fraction else _SUFFIX.match(text, end)
    if suffix:
        end = suffix.end()
        if "$" in text[end:].partition("\n")[0]:
            value = None  # `$5m$` is LaTeX, and no money
        value = None if value is None else value * _SCALE_OF_MONEY[suffix[1].strip().lower()]
    elif number["currency"] and _ONE_LETTER.match(text, end):
        value = None  # the L of lakh, and whatever else a letter may mean after an amount of money
    for _ in range(3):
        scale = _SCALE_WORD.match(text, end)
        if scale:
            end = scale.end()
            value = None if value is None else value * _SCALE[scale[1].lower()]
    if end > number.end() and _ORDINAL_ENDING.match(text, end):
        value = None
    return value, end


def is_unit(text: str, start: int) -> bool:
    """Whether what follows the number that ends at `start` of a line leaves it as it is."""
    line_end = text.find("\n", start)
    after = text[start : line_end if line_end >= 0 else len(text)]
    if _NOT_A_UNIT.match(after):
        return False
    sentence_end = _SENTENCE_END.search(after)
    next_word = _next_word(after, sentence_end.end()) if sentence_end else ""
    if _changes_number(next_word) or _has_scripts(next_word):
        return False  # `5. Millionen` and `5. Dozen\u00b2`
    phrase = after[: sentence_end.start()] if sentence_end else after
    marks = _AFTER_NUMBER.match(phrase)
    if marks and marks.end():
        phrase = " " + phrase[marks.end() :]
    phrase = _PLACE.sub("", _UNIT_POWER.sub("", _ASIDE.sub("", phrase)))
    end = 0
    while end < len(phrase):
        token = _UNIT_TOKEN.match(phrase, end)
        if token is None:
            return False
        if token["word"] and not _is_unit_word(token["word"], glued=end == 0):
            return False
        end = token.end()
    return True


def _next_word(text: str, start: int) -> str:
    word = re.compile(r"[\W_]*([^\W\d_]*)").match(text, start)
    return word[1] if word else ""


def _changes_number(word: str) -> bool:
    """Whether a word after a number is a number, a scale or an operation."""
    spelled = word.casefold()
    return bool(
        spelled in _OTHER_SCALES
        or spelled in _OBJECTIONS
        or _KOREAN_SCALE.fullmatch(word)
        or _NO_UNIT.fullmatch(word)
        or NUMBER_WORD.fullmatch(word)
    )


def _has_scripts(word: str) -> bool:
    """Whether a letter of a word is a numeral, a superscript, a subscript or a variable."""
    return any(
        unicodedata.numeric(letter, None) is not None
        or unicodedata.decomposition(letter).startswith(("<su", "<font"))
        for letter in word
    )


def _is_unit_word(word: str, *, glued: bool) -> bool:
    """Whether a word may be a unit, or stand beside one."""
    if _has_scripts(word):
        return False
    parts = re.split("['\u2019-]", word)
    if any(_changes_number(part) for part in [*parts, "".join(parts)]):
        return False
    first = parts[0]
    if len(parts) > 1:
        if not _JOINED_WORD.fullmatch(word):
            return False
        if not glued:
            return True
    if len(first) == 1 and first.lower() != first.upper():
        return first in ONE_LETTER_UNITS or (first == "a" and not glued)
    return not (glued and first.isascii()) or len(first) > 3 or bool(_GLUED_UNITS.fullmatch(first))
