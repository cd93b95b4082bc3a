"""A run's folder with values in it that nobody writes: all that reads it goes on."""

import asyncio
import io
import json
import shutil

import pytest
from rich.console import Console

from benchmarks.made_run.made_run import make_run
from dashboard.runs import run_follower
from dashboard.runs.driver_client import no_fleet
from dashboard.runs.run_follower import RunFollower, step_json
from diagnosis import ledger_report, what_if_report
from diagnosis.judgement.history import history
from diagnosis.records.facts import RunSettings
from diagnosis.records.run_log import natural
from driver.terminal import top
from driver.terminal.harmless import make_harmless
from services.wire.strict_json import encode
from tests.dashboard.served import strict

pytestmark = pytest.mark.slow

ENDLESS = 10**400
NUMBERS = (ENDLESS, -1.0, 0, float("nan"), float("inf"), "NaN", True, [], [1.0], {}, None, 1e308)

ALIASES = [f"a{i + 1}: &a{i + 1} [{f'*a{i},' * 9}]\n" for i in range(8)]
"""Lines of YAML of which each has nine times the values of the one before."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    make_run(folder, steps=14, workers=2)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    """A run that a test may change."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    return tmp_path


def rewrite(path, change, line: int = -1) -> None:
    """Changes the record of one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[line] = json.dumps(change(json.loads(lines[line])))
    path.write_text("\n".join(lines) + "\n")


def read_all(folder) -> None:
    """Makes every document of the dashboard, and the reports; a failure would end the server."""
    follower = RunFollower(folder)
    asyncio.run(follower.publish_news())
    documents = [
        *(
            follower.run(),
            follower.judgement(),
            history(follower.log),
            history(follower.log, points=10),
        ),
        *(step_json(facts, follower.log.groups(facts.step)) for facts in follower.log.recent(3)),
        *(follower.timeline.timeline(), follower.timeline.trace()),
    ]
    for document in documents:
        strict(encode(document))
    assert follower.exporter.text(follower.run(), no_fleet("nobody asks"))
    arguments = ["--run", str(folder)]
    assert ledger_report.main(arguments) in (0, 1, 2)
    assert what_if_report.main(arguments) in (0, 2)
    assert top.main([*arguments, "--once"], Console(width=100, quiet=True)) == 0


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: repr(value)[:20])
def test_a_ledger_of_impossible_numbers_ends_nothing(folder, value):
    path = folder / "ledger.jsonl"

    def phases(record):
        return {name: dict.fromkeys(row, value) for name, row in record["processes"].items()}

    changes = (
        lambda record: {**record, "wall_s": value},
        lambda record: {**record, "wall_s": value, "processes": phases(record)},
        lambda record: {**record, "processes": {"learner": {"update": value}}},
        lambda record: {
            **record,
            "warnings": value,
            "overlap_s": {"learner": value},
            "absent_s": value,
        },
        lambda record: {**record, "groups": {"trained": value}, "outstanding": value},
    )
    for line, change in enumerate(changes, -len(changes)):
        rewrite(path, change, line)
    read_all(folder)


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: repr(value)[:20])
def test_metrics_of_impossible_numbers_end_nothing(folder, value):
    path = folder / "metrics.jsonl"
    rewrite(path, lambda record: {**dict.fromkeys(record, value), "step": record["step"]})
    read_all(folder)


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: repr(value)[:20])
def test_a_status_of_impossible_values_ends_nothing(folder, value):
    path = folder / "status.json"
    status = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key in status if key != "state"}))
    read_all(folder)


@pytest.mark.parametrize("value", ["abc", [1], {"a": 1}, -5, float("inf"), float("nan"), True])
def test_settings_of_another_kind_are_those_of_a_run_that_has_none(value):
    usual = RunSettings.of({})
    sections = {
        "run": ("steps",),
        "rollout": ("max_staleness", "prompts_per_step", "max_completion_tokens", "decode"),
        "log": ("unexplained_fraction",),
        "algorithm": ("kl_coef", "off_policy"),
        "weights": ("canary_bound",),
        "placement": (),
    }
    config = {name: dict.fromkeys(keys, value) for name, keys in sections.items()}
    assert RunSettings.of(config) == usual
    workers = {"workers": {"min": value, "max": value}}
    assert RunSettings.of({"rollout": workers}) == usual


@pytest.mark.parametrize(
    "name, text",
    [
        ("status.json", "[" * 100_000),
        ("environment.json", '{"a":' * 100_000),
        ("config.yaml", "run: &a [*a]\n"),
        ("config.yaml", "a0: &a0 [x]\n" + "".join(ALIASES)),
        ("config.yaml", "reward: {functions: 3}\n"),
    ],
    ids=["deep", "deep object", "endless", "of aliases", "no functions"],
)
def test_a_file_that_is_nested_without_end_ends_nothing(folder, name, text):
    (folder / name).write_text(text)
    read_all(folder)


@pytest.mark.parametrize("text", ["[1]", "7", "null", "{"])
def test_an_environment_that_is_none_is_null(folder, text):
    (folder / "environment.json").write_text(text)
    assert RunFollower(folder).run()["environment"] is None


def test_a_process_with_thousands_of_digits_has_its_place():
    names = ["rollout-10", "rollout-9", "rollout-" + "9" * 5000]
    assert sorted(names, key=natural) == [names[1], names[0], names[2]]


def test_no_text_of_a_run_commands_a_terminal(folder):
    status = json.loads((folder / "status.json").read_text())
    hostile = "\x1b[31mred\x1b]0;title\x07\x9b2J"
    changed = {**status, "run": hostile, "reason": hostile}
    (folder / "status.json").write_text(json.dumps(changed))
    for line in range(-3, 0):
        name = "ledger.jsonl"
        rewrite(folder / name, lambda r: {**r, "processes": {hostile: {"decode": 1.0}}}, line)
    shown = io.StringIO()
    console = make_harmless(Console(file=shown, width=100))
    assert top.main(["--run", str(folder), "--once"], console) == 0
    assert "red" in shown.getvalue() and not set("\x1b\x07\x9b") & set(shown.getvalue())


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "status.json", "timeline.jsonl"])
def test_a_folder_in_place_of_a_file_is_named_by_every_program(folder, name, capsys):
    (folder / name).unlink()
    (folder / name).mkdir()
    for main in (ledger_report.main, what_if_report.main, top.main):
        if main(["--run", str(folder)]) == 2:
            said = capsys.readouterr().err
            assert said.startswith("error: ") and name in said


@pytest.mark.parametrize("bound", ["nan", "-1", "inf", "much"])
def test_no_bound_that_everything_is_within_can_be_given(folder, bound, capsys):
    with pytest.raises(SystemExit) as end:
        ledger_report.main(["--run", str(folder), "--bound", bound])
    assert end.value.code == 2 and "--bound" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_reported_once(folder, caplog):
    async def some_turns(follower):
        async with follower.following():
            await asyncio.sleep(run_follower.POLL_S * 4)

    follower = RunFollower(folder)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    asyncio.run(some_turns(follower))
    told = [one for one in caplog.records if "cannot read the run" in one.message]
    assert len(told) == 1 and follower.failure is None
