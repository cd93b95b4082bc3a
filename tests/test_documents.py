"""Every file, module and make target that a document names exists."""

import ast
import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/*.md")]
)
PATH = re.compile(r"(?<![\w./<-])((?:[a-z_]+/)+[\w.-]*\w\.(?:py|md|json|yaml|jpg|proto))\b")
FOLDER = re.compile(r"`((?:[a-z_]+/){2,})`")
COMMAND = re.compile(r"python -m ([a-z_0-9]+(?:\.[a-z_0-9]+)*)")
TARGET = re.compile(r"`make ([a-z-]+)`")
WALK = re.compile(r"^\| `([\w/]+\.py)`: `(\w+)\.(\w+)`", re.MULTILINE)
OF_READERS = {
    *("my_pkg/rewards.py", "my_pkg/judge.py", "my_pkg/diversity.py", "my_pkg/losses.py"),
    "my_pkg/agent.py",
    "my_pkg/retry.py",
    "my_pkg/checking.py",
    "my_pkg/tools.py",
}
"""Paths that a reader makes himself."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_is_there(document):
    text = (ROOT / document).read_text()
    named = {*PATH.findall(text), *FOLDER.findall(text)} - OF_READERS
    missing = [name for name in sorted(named) if not _exists(document, name)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_that_a_document_names_is_there(document):
    text = (ROOT / document).read_text()
    modules = sorted(set(COMMAND.findall(text)))
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(set(TARGET.findall(text)) - set(targets)) == []


def test_every_function_of_the_walks_in_architecture_exists():
    rows = WALK.findall((ROOT / "ARCHITECTURE.md").read_text())
    assert len(rows) > 30
    for path, owner, function in rows:
        module = ast.parse((ROOT / path).read_text())
        owners = [node for node in module.body if getattr(node, "name", "") == owner]
        assert owners, f"{path} has no class {owner}"
        names = {getattr(node, "name", "") for node in owners[0].body}
        assert function in names, f"{path}: {owner} has no {function}"


def test_the_job_server_of_the_readme_listens_where_jobs_are_sent_F1():
    text = (ROOT / "README.md").read_text()
    (section,) = [part for part in text.split("```sh") if "ray start --head" in part]
    commands = section.partition("```")[0]
    (listens,) = re.findall(r"--dashboard-host[ =](\S+)", commands)
    (sent_to,) = re.findall(r"RAY_ADDRESS=http://(\S+):8265", commands)
    assert listens == sent_to, "jobs are sent to an address at which nothing answers"


def _exists(document: str, name: str) -> bool:
    """A path counts from the root or from the document's own folder; those of a run are its own."""
    folders = (ROOT, (ROOT / document).parent)
    return name.startswith("runs/") or any((folder / name).exists() for folder in folders)
