"""Searches the texts of a folder for passages that share words with a query (BM25)."""

import functools
import pathlib
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from rollout_worker.environments.tools.function_schemas import BadTool

_ENDINGS = (".md", ".rst", ".txt")
_MOST_BYTES = 64 * 2**20
_PASSAGE = 1000
"""Characters that a passage has at least, where its text goes on."""
_MOST_WORDS = 64
"""Of a query."""
_WORD = re.compile(r"\w+")


def make_search(folder: str, results: Annotated[int, Field(ge=1)] = 3) -> Callable[[str], str]:
    """The tool, over the .md, .rst and .txt files of a folder and the folders in it.

    Args:
        folder: its path.
        results: passages that a call returns at most.

    Raises:
        BadTool: if there is nothing to search, or the package rank-bm25 is not installed.
    """
    passages, index = _index(folder)

    def search(query: str) -> str:
        """Searches the documents for passages that share words with a query.

        Args:
            query: A few words.
        """
        words = list(dict.fromkeys(_words(query)))[:_MOST_WORDS]
        found = [
            place for place, has in enumerate(index.doc_freqs) if not has.keys().isdisjoint(words)
        ]
        if not found:
            return "Nothing found."
        scores = index.get_scores(words)
        best = sorted(found, key=lambda place: (-scores[place], place))[:results]
        return "\n\n".join(passages[place] for place in best)

    return search


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


@functools.lru_cache(maxsize=8)
def _index(folder: str) -> tuple[list[str], Any]:
    """The passages of a folder, each with the path of its file, and their index."""
    try:
        import rank_bm25  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise BadTool(
            f"tool 'search' needs the package rank-bm25, which does not import ({error}): "
            "pip install '.[search]'"
        ) from error
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise BadTool(
            f"tool 'search': there is no folder {folder!r} (looked for {root.absolute()})"
        )
    paths = sorted(path for path in root.rglob("*") if path.suffix in _ENDINGS and path.is_file())
    size = sum(path.stat().st_size for path in paths)
    if not size or size > _MOST_BYTES:
        raise BadTool(
            f"tool 'search': the files of folder {folder!r} that end in {', '.join(_ENDINGS)} have "
            f"{size:,} bytes together, between 1 and {_MOST_BYTES:,} can be searched"
        )
    passages = [
        f"{path.relative_to(root)}: {passage}"
        for path in paths
        for passage in _passages(path.read_text("utf-8", "replace"))
    ]
    return passages, rank_bm25.BM25Plus([_words(passage) for passage in passages])


def _passages(text: str) -> list[str]:
    """Paragraphs, joined until they have some length."""
    passages = [""]
    for paragraph in re.split(r"\n\s*\n", text):
        if len(passages[-1]) >= _PASSAGE:
            passages.append("")
        passages[-1] = f"{passages[-1]}\n\n{paragraph.strip()}".strip()
    return [passage for passage in passages if passage]
