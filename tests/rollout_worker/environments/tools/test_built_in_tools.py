"""Tools by name: Python in its sandbox, search in a folder, and functions of one's own."""

import builtins
import sys

import pytest

from rollout_worker.environments.tools.built_in_tools import load_tool
from rollout_worker.environments.tools.function_schemas import BadTool, schema_of
from rollout_worker.rewards.code.sandbox import confinement_problem
from rollout_worker.rewards.scorers import BadScorer
from tests.rollout_worker.environments.tools import tool_kinds

KINDS = "tests.rollout_worker.environments.tools.tool_kinds"


def test_every_built_in_tool_has_a_schema():
    for given in ("calculator", {"name": "python", "sandbox": "best_effort"}):
        schema = schema_of(load_tool(given))["function"]
        assert schema["name"] in str(given) and len(schema["parameters"]["required"]) == 1


def test_a_function_of_ones_own_is_found():
    assert load_tool(f"{KINDS}:weather") is tool_kinds.weather


def test_a_function_of_a_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "my_prices.py").write_text("def price(): return 3\n")
    assert load_tool(f"{tmp_path}/my_prices.py:price")() == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("calculater", "unknown tool 'calculater' .nearest: 'calculator'.: built in are calc"),
        ({"name": "calculator", "digits": 3}, "'calculator': .*'digits'; it takes no parameters"),
        ({"name": "python", "second": 3}, "'python': .*'second'; it takes .'seconds', 'memory_mb'"),
        ({"name": "python", "seconds": -1}, "'python': seconds=-1 cannot be: .*greater than 0"),
        ({"name": "python", "seconds": "3"}, "'python': seconds='3' cannot be: .*valid number"),
        ({"name": "search", "folder": "docs", "results": 0}, "'search': results=0 cannot be"),
        ({"name": "search", "folder": 3}, "'search': folder=3 cannot be: .*valid string"),
        ({"seconds": 3}, "a tool is a name, or a mapping with a name"),
        (3, "a tool is a name, or a mapping with a name, got 3"),
        (f"{KINDS}:wether", "wether.*nearest: 'weather'"),
        ("no_such_package:f", "cannot import 'no_such_package'"),
        ("no_such_file.py:f", "tool 'no_such_file.py:f': file 'no_such_file.py' does not exist"),
        ({"name": f"{KINDS}:weather", "city": "Rome"}, r"takes no parameters, got \['city'\]"),
    ],
)
def test_what_is_no_tool_is_refused(given, message):
    with pytest.raises(BadScorer, match=message):
        load_tool(given)


# --- python


@pytest.fixture(scope="module")
def python():
    return load_tool({"name": "python", "sandbox": "best_effort", "seconds": 20.0})


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(sum(range(10)))", "45\n"),
        ("import sys; print('a'); sys.exit(3)", "a\n[exit code 3]\n"),
        ("x = 1", ""),
    ],
)
def test_python_returns_what_is_printed(python, code, result):
    assert python(code) == result


def test_python_returns_the_error_of_a_program(python):
    assert "ZeroDivisionError: division by zero" in python("print(1 / 0)")
    assert "SyntaxError" in python("print(")


def test_python_keeps_nothing_between_calls(python):
    python("x = 1\nopen('f', 'w').write('x')")
    assert "NameError" in python("print(x)")
    assert "FileNotFoundError" in python("open('f')")


def test_python_ends_at_its_limits():
    hasty = load_tool({"name": "python", "sandbox": "best_effort", "seconds": 1.0})
    assert hasty("while True: pass").endswith("[ended after 1 s]")
    assert (
        len(load_tool({"name": "python", "sandbox": "best_effort"})("print('x' * 10**7)")) < 70_000
    )


@pytest.mark.skipif(bool(confinement_problem()), reason="code cannot be confined here")
def test_python_reaches_nothing_of_the_host():
    confined = load_tool({"name": "python", "seconds": 20.0})
    assert "Error" in confined("import socket; socket.create_connection(('127.0.0.1', 1))")
    assert "Error" in confined(f"open({__file__!r})")


def test_python_is_refused_where_code_cannot_be_confined(monkeypatch):
    where = "rollout_worker.environments.tools.python_tool.confinement_problem"
    monkeypatch.setattr(where, lambda: "no namespaces")
    with pytest.raises(BadTool, match="cannot be confined on this host: no namespaces. .*best_eff"):
        load_tool("python")


# --- search


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("rank_bm25")
    (tmp_path / "deep").mkdir()
    (tmp_path / "tea.md").write_text(
        f"Green tea is steamed.\n\n{'Leaves. ' * 200}\n\nBlack tea: é."
    )
    (tmp_path / "deep" / "rivers.txt").write_text("The Danube is a river.")
    (tmp_path / "code.py").write_text("danube = 1")
    return tmp_path


def test_search_finds_the_passages_that_share_most_with_a_query(folder):
    search = load_tool({"name": "search", "folder": str(folder)})
    assert search("Which river is the DANUBE?").startswith(
        "deep/rivers.txt: The Danube is a river."
    )
    assert "code.py" not in search("danube")
    assert search("black tea é").startswith("tea.md: Black tea: é.")
    assert search("quark") == search("") == "Nothing found."


def test_search_returns_at_most_what_is_asked_for(folder):
    search = load_tool({"name": "search", "folder": str(folder), "results": 1})
    assert "Black" in search("black tea") and "Green" not in search("black tea")


def test_search_needs_its_package_and_says_how_to_install_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **named):
        if name == "rank_bm25":
            raise ModuleNotFoundError("No module named 'rank_bm25'")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadTool, match=r"needs the package rank-bm25.*pip install '\.\[search\]'"):
        load_tool({"name": "search", "folder": str(tmp_path)})


@pytest.mark.parametrize(
    ("folder", "message"),
    [("no_such_folder", "there is no folder 'no_such_folder'"), ("", "have 0 bytes together")],
)
def test_search_needs_something_to_search(tmp_path, folder, message):
    pytest.importorskip("rank_bm25")
    with pytest.raises(BadTool, match=message):
        load_tool({"name": "search", "folder": folder or str(tmp_path)})
