"""Two runs side by side, as /api/compare has them."""

from typing import Any

from dashboard.runs.live import Live
from diagnosis.compare.compare import compare


class Pair:
    """Two runs, of which the first is kept up to date by the server, and the second when asked."""

    def __init__(self, a: Live, b: Live):
        self._a = a
        self._b = b
        b.compares = True

    def document(self, first: int | None, last: int | None, points: int) -> dict[str, Any]:
        """The document of /api/compare; call it through `read` of the first run.

        Raises:
            ValueError: for a range or number of points that cannot be.
        """
        self._b.look()
        logs = self._a.log, self._b.log
        runs = [self._a.run(), self._b.run()]
        return {"runs": runs, **compare(*logs, first=first, last=last, points=points)}
