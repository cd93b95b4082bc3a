"""Clocks of hosts differ by a day: certificates hold, and no wait or identity asks the time."""

import ast
import datetime
import pathlib

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from services.wire.tls import CLOCK_SKEW, SERVER_NAME, RunAuthority

ROOT = pathlib.Path(__file__).resolve().parents[1]
DAY = datetime.timedelta(days=1)

WALL_CLOCK = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("time", "gmtime"),
    ("time", "ctime"),
    ("time", "strftime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}
ALLOWED = {
    "driver/reports/metrics.py": "the moment a line of metrics was written, for people",
    "driver/reports/status.py": "the start and the end of the run, for people",
    "driver/reports/end_watch.py": "the end of a run that its driver could not write, for people",
    "driver/reports/step_report.py": "the seconds of the summary, counted from status.json",
    "driver/postmortem/archive.py": "the name of a bundle and the moments in it",
    "driver/postmortem/host_state.py": "moments in a post-mortem bundle, for people",
    "services/process/stacks.py": "the line above a dump of stacks, for people",
    "driver/config/prepare.py": "the moment that chat templates read, kept for the whole run",
    "driver/sft/sft_plan.py": "the moment that chat templates read, kept for the whole training",
    "driver/sft/sft_run.py": "the moment a line of metrics was written, for people",
    "driver/config/paths.py": "{time} in the name of a new folder",
    "driver/reports/tensorboard.py": "the wall time of an event, for people",
    "rollout_worker/environments/openai_endpoint/chat_answer.py": "`created` of OpenAI's API",
    "driver/reports/timeline.py": "the moments in timeline.jsonl, for people",
    "driver/terminal/top.py": "how long ago the last step was, for people",
    "dashboard/runs/run_follower.py": "how long ago the last step was, for people",
    "services/wire/tls.py": "the validity of certificates, which starts a day in the past",
}
"""Files that may ask what time it is, and what they do with the answer."""


def check(credentials, skew: datetime.timedelta) -> None:
    """Verifies a certificate as both ends of a connection whose clock is off by `skew` do."""
    leaf = x509.load_pem_x509_certificate(credentials.cert_pem)
    authority = x509.load_pem_x509_certificate(credentials.ca_pem)
    moment = datetime.datetime.now(datetime.UTC) + skew
    policy = PolicyBuilder().store(Store([authority])).time(moment.replace(tzinfo=None))
    policy.build_server_verifier(x509.DNSName(SERVER_NAME)).verify(leaf, [])
    policy.build_client_verifier().verify(leaf, [])


@pytest.mark.parametrize("skew", [-DAY, datetime.timedelta(0), DAY])
def test_a_host_whose_clock_is_a_day_off_accepts_the_run(skew):
    assert CLOCK_SKEW >= DAY
    check(RunAuthority.create("r").issue("rollout-0"), skew)


@pytest.mark.parametrize("skew", [-2 * DAY, 366 * DAY])
def test_validity_is_looked_at_all_the_same(skew):
    with pytest.raises(VerificationError, match="not valid at validation time"):
        check(RunAuthority.create("r").issue("rollout-0"), skew)


def wall_clock_calls(tree: ast.AST) -> list[int]:
    """Lines that ask for the time of day: `time.time()`, `datetime.datetime.now()`, ..."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = getattr(owner, "attr", getattr(owner, "id", ""))
            if (name, node.attr) in WALL_CLOCK:
                found.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for one in node.names if ("time", one.name) in WALL_CLOCK]
    return found


def uses() -> dict[str, list[int]]:
    """Lines that ask for the time of day, by file."""
    found = {}
    for package in ("driver", "learner", "rollout_worker", "services"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if lines := wall_clock_calls(ast.parse(path.read_text(encoding="utf-8"))):
                found[str(path.relative_to(ROOT))] = lines
    return found


def test_only_what_is_written_for_people_asks_the_time_of_day():
    new = {file: lines for file, lines in uses().items() if file not in ALLOWED}
    assert not new, (
        f"{new}: a wait or an identity must not hang on the clock of a host: use time.monotonic(); "
        "what is only written down for people may be added to ALLOWED, with its purpose"
    )


@pytest.mark.parametrize(
    "source, found",
    [
        ("import time\nend = time.time() + 3", [2]),
        ("import datetime\nnow = datetime.datetime.now(datetime.UTC)", [2]),
        ("from time import time", [1]),
        ("clock = time.time_ns", [1]),
        ("import time\nend = time.monotonic() + 3\ntime.sleep(1)", []),
        ("started = status.current.time", []),
    ],
)
def test_the_walk_finds_what_it_looks_for(source, found):
    assert wall_clock_calls(ast.parse(source)) == found
