"""Functions that users name: found, or refused with the place and the fix."""

import sys

import pytest

from services.user_code.import_path import (
    BadImportPath,
    NoSuchModule,
    load_attribute,
    load_named,
    nearest_hint,
)

MODULES = {
    "uc_good": "def score(): return 1\nLIMIT = 3\n_hidden = 4\n",
    "uc_syntax": "def score(:\n",
    "uc_raises": "def inner():\n    raise RuntimeError('no\\n  model here')\ninner()\n",
    "uc_needs": "import uc_no_such_package\n",
    "uc_exits": "import sys\nsys.exit('bye')\n",
    "uc_asks": "raise EOFError('EOF when reading a line')\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def test_what_is_named_is_returned():
    assert load_attribute("uc_good:score")() == 1 and load_attribute("uc_good:LIMIT") == 3


@pytest.mark.parametrize(
    "path, message",
    [
        ("uc_good:scor", r"module 'uc_good' \(.*uc_good.py\) has no 'scor' \(nearest: 'score'\)"),
        ("uc_good:hidden", r"has no 'hidden'$"),
        ("uc_syntax:score", r"importing 'uc_syntax' fails: SyntaxError: .*\(.*uc_syntax.py:1\)"),
        ("uc_raises:score", r"RuntimeError: no model here \(.*:2, reached from .*uc_raises.py:3\)"),
        ("uc_needs:score", r"fails: No module named 'uc_no_such_package' \(.*:1\); install it"),
        ("uc_exits:score", r"it calls sys.exit\('bye'\)"),
        ("uc_asks:score", "it has no standard input"),
    ],
)
def test_what_cannot_be_loaded_says_why_and_where(path, message):
    with pytest.raises(BadImportPath, match=message) as caught:
        load_attribute(path)
    assert not isinstance(caught.value, NoSuchModule) and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["uc_absent:score", "uc_absent.deeper:score", "uc_good.deeper:x"])
def test_a_module_that_is_not_there_is_told_apart(path):
    with pytest.raises(NoSuchModule, match="it must be importable from /.* or installed"):
        load_attribute(path)


def test_a_near_name_is_offered_and_a_far_one_is_not():
    assert nearest_hint("scor", ["score", "limit"]) == " (nearest: 'score')"
    assert nearest_hint("zzz", ["score"]) == ""


def test_a_function_of_a_file_is_returned(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "uc_file.py").write_text("import uc_beside\nfind = uc_beside.find\n")
    (tmp_path / "deep" / "uc_beside.py").write_text("def find(): return 5\n")
    monkeypatch.chdir(tmp_path)
    assert load_named("deep/uc_file.py:find")() == 5
    assert load_named(f"{tmp_path}/deep/uc_file.py:find") is load_named("uc_file:find")


@pytest.mark.parametrize(
    "name, message",
    [
        ("uc_god.py:score", r"file 'uc_god.py' does not exist .*nearest: 'uc_good.py'"),
        ("no_folder/uc_good.py:score", "does not exist .looked in .*/no_folder"),
        ("json.py:loads", "imported as 'json', but that is another module here .*json/__init__.py"),
        ("sys.py:exit", "imported as 'sys', .*built in.: give the file another name"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_why(tmp_path, monkeypatch, name, message):
    for shadowed in ("json", "sys"):
        (tmp_path / f"{shadowed}.py").write_text("def loads(): return 1\n")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadImportPath, match=message):
        load_named(name)
