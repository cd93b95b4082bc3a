"""Checks that documents name only files, folders and make targets that exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = [path.parent.name for path in ROOT.glob("*/__init__.py")]
FOLDERS = "|".join([*PACKAGES, "deploy", "docs", "proto", "tests"])
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/chaos.md", "tests/README.md"])
def test_paths_and_make_targets_in_documents_exist(document):
    text = (ROOT / document).read_text()
    paths = PATH.findall(text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake ([a-z0-9-]+)`", text)) <= set(targets)
