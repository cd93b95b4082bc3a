"""What counts as a secret: by the name of a setting or variable, or by what a text looks like.

The one notion for all that a run writes, shows or passes on: its settings, the environment of
scorers and of the page, logs, trackers and the post-mortem.
"""

import re
from collections.abc import Iterable, Mapping, Sequence


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = _word_set(
    "password passwords passwd passphrase passcode credential credentials apikey authorization "
    "dsn webhook"
)
_SECRET_ENDINGS = (
    "password",
    "passwd",
    "secret",
    "apikey",
    "secretkey",
    "accesskey",
    "privatekey",
    "authtoken",
    "accesstoken",
    "connectionstring",
)
_SECRET_LAST = _word_set("key keys token auth pwd pass pat bearer cookie secret secrets")
_AFTER_SECRET = _word_set(
    "0 1 2 3 4 5 6 7 8 9 old new ro rw prod dev test staging base b64 64 b pem value raw"
)
"""Words after `key` or `token` that leave the name a secret's: `API_KEY_2`, `GH_TOKEN_RO`."""
_HARMLESS_BEFORE = _word_set(
    "answer answers question prompt item dict json yaml sort primary public foreign index "
    "group field column row lookup cache map match start end stop bos eos pad unk sep cls "
    "mask image special first last next new max min per every each think no one reward score"
)
"""Words before `key` or `token` of names that are no secret's: `answer_key`, `eos_token`."""
_PEM_BEGIN = r"-----BEGIN [A-Z0-9 ]*(?:PRIVATE KEY|CERTIFICATE)-----"
_KEYS_AND_TOKENS = (
    _PEM_BEGIN,
    r"\bsk-(?=\w*\d)\w{20,}",  # OpenAI
    r"\bsk-(?:proj|svcacct|admin|ant|or)-(?=[\w-]*\d)[\w-]{20,}",  # OpenAI, Anthropic, OpenRouter
    r"\b[srp]k_(?:live|test)_\w{10,}",  # Stripe
    r"\bwhsec_\w{16,}",
    r"\bgh[opsur]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_\w{20,}",
    r"\bglpat-[\w-]{16,}",
    r"\bxox[abeoprs]-[\w-]{10,}",  # Slack
    r"\bhooks\.slack\.com/services/\w+/\w+/\w+",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bAIza[\w-]{30,}",  # Google
    r"\bya29\.[\w-]{16,}",
    r"\bhf_(?=\w*[A-Z])[A-Za-z0-9]{16,}",
    r"\bpypi-[\w-]{30,}",
    r"\bnpm_[A-Za-z0-9]{30,}",
    r"\bdop_v1_[0-9a-f]{40,}",
    r"\bSG\.[\w-]{16,}\.[\w-]{16,}",  # SendGrid
    r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",  # JSON web token
)
_TOKEN = re.compile("|".join(_KEYS_AND_TOKENS))
_URL_PASSWORD = re.compile(r"(://)[^/\s:@\"']*:[^/\s@\"']+@")
_URL_QUERY = re.compile(
    r"([?&](?:[\w-]*[_-])?(?:(?:api)?key|token|secret|password|sig(?:nature)?)=)[^&\s\"'<]{8,}",
    re.I,
)
_OPAQUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w.~+/=-]{16,}")
_KEY_OF_SETTING = re.compile(rf"{_OPAQUE.pattern}|(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9.~+/=-]{{8,}}")
_BEARER = re.compile(r"\b(bearer[ \t]+)(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}", re.I)
_PEM = re.compile(_PEM_BEGIN + r".*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.S)
_NAMED = re.compile(
    r"((?:token|secret|api[_-]?key|[_-]key|credentials?)"
    r"[\"']?[ \t]*[:=][ \t]*[\"']?)"
    r"(?![\d.eE+-]+(?:[\s,;}\"')]|$))[\w./+=~-]{16,}",
    re.I,
)
"""A value beside its name, in a log; a number of many digits is none."""
_PASSWORD = re.compile(
    r"((?:secret_?access_?key|account_?key|password|passwd)[\"']?[ \t]*[:=][ \t]*[\"']?)"
    r"(?![<*])[^\s\"',;&}]{6,}",
    re.I,
)
"""A value beside a name that leaves no doubt, however short."""
_BASIC = re.compile(r"\b(authorization:?[ \t\"']*basic[ \t]+)[\w+/=]{8,}", re.I)
_LEAST_CHARS = 8
"""A shorter value of a variable is a word such as `on`, not a secret."""


def names_secret(name: str, value: object = "") -> bool:
    """Whether a setting or variable of this name holds a secret: `OPENAI_KEY`, `db.password`.

    Args:
        value: decides for a name that is `key` or `token` and says no more.
    """
    words = _words(name)
    while len(words) > 1 and words[-1] in _AFTER_SECRET:
        words = words[:-1]
    if _is_of_secrets(words):
        return True
    if not words or words[-1] not in _SECRET_LAST:
        return False
    if len(words) == 1:
        return isinstance(value, str) and _OPAQUE.fullmatch(value) is not None
    return words[-2] not in _HARMLESS_BEFORE


def setting_is_secret(name: str, value: str) -> bool:
    """Whether a setting holds a secret: parameters of a scorer may be named `label_key`, so that a
    key or token must also look like one.
    """
    looks = _KEY_OF_SETTING.fullmatch(value) is not None
    return _is_of_secrets(_words(name)) or (looks and names_secret(name, value))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def _is_of_secrets(words: Sequence[str]) -> bool:
    """Whether the words of a name leave no doubt."""
    return not _SECRET_WORDS.isdisjoint(words) or "".join(words).endswith(_SECRET_ENDINGS)


def looks_secret(text: str) -> str:
    """What secret a text contains by its looks, such as `a password in a URL`; '' for none."""
    if _URL_PASSWORD.search(text):
        return "a password in a URL"
    if _URL_QUERY.search(text):
        return "a key in a URL"
    if _TOKEN.search(text):
        return "a key or token"
    return "a bearer token" if _BEARER.search(text) else ""


def hide_secrets(text: str) -> str:
    """The text with `<secret>`, `<credentials>` or `<PEM>` in place of all that looks like one."""
    text = _PEM.sub("<PEM>", text)
    text = _URL_PASSWORD.sub(r"\1<credentials>@", text)
    text = _URL_QUERY.sub(r"\1<secret>", text)
    text = _BEARER.sub(r"\1<secret>", text)
    text = _TOKEN.sub("<secret>", text)
    text = _PASSWORD.sub(r"\1<secret>", text)
    text = _BASIC.sub(r"\1<secret>", text)
    return _NAMED.sub(r"\1<secret>", text)


class SecretFilter:
    """Hides secrets in text: those of an environment, and all that look like one."""

    def __init__(self, environ: Mapping[str, str]):
        named = {
            value.strip(): name
            for name, value in environ.items()
            if names_secret(name, value) and len(value.strip()) >= _LEAST_CHARS
        }
        # The longest first: a secret may be a part of another.
        self._values = sorted(named.items(), key=lambda pair: -len(pair[0]))

    def clean(self, text: str) -> str:
        """The text with `<NAME>` in place of a secret variable's value, and as `hide_secrets`."""
        for value, name in self._values:
            text = text.replace(value, f"<{name}>")
        return hide_secrets(text)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables but for those that hold a secret by their name or by what they look like."""
    return {
        name: value
        for name, value in environ.items()
        if not names_secret(name, value) and not looks_secret(value)
    }


_PASSED = _word_set(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM TMPDIR TEMP TMP VIRTUAL_ENV "
    "CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE "
    "CURL_CA_BUNDLE HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY TRANSFORMERS_CACHE "
    "TRANSFORMERS_OFFLINE TORCH_HOME NLTK_DATA CUDA_VISIBLE_DEVICES TANDEM_HOME"
)
_PASSED_BEGINNINGS = ("LC_", "PYTHON", "HF_", "XDG_", "OMP_", "OPENBLAS_", "MKL_", "TOKENIZERS_")


def scorer_environment(environ: Mapping[str, str], listed: Iterable[str]) -> dict[str, str]:
    """The variables that foreign code gets: those that programs need to run, and no secret.

    Args:
        environ: of this process.
        listed: names of further variables, which the user gives to scorers; they may be secrets.
    """
    usual = {
        name: value
        for name, value in environ.items()
        if name.upper() in _PASSED or name.startswith(_PASSED_BEGINNINGS)
    }
    return without_secrets(usual) | {name: environ[name] for name in listed if name in environ}
