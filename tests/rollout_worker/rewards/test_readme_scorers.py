"""The scorers that the README shows are run as it says."""

import http.server
import json
import pathlib
import re
import threading
from contextlib import closing

import pytest

from rollout_worker.config.reward_config import RewardFunctionConfig
from rollout_worker.rewards.reward_pool import RewardPool, ScoreRequest
from tests.deadlines import HANG_S

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[3]
MOST_LINES = 12


class Judge(http.server.BaseHTTPRequestHandler):
    """Gives the share of the question that the completion repeats."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"score": len(asked["completion"]) / len(asked["question"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # of 5, a busy machine resets connections that come at once


@pytest.fixture
def scorers(tmp_path, monkeypatch):
    """Writes the blocks to the files that they name."""
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^  ```python\n  # (\S+)\n(.*?)^  ```", readme, re.M | re.S)
    files = {}
    for name, block in blocks:
        assert block.count("\n") < MOST_LINES
        files[name] = "".join(line[2:] for line in block.splitlines(keepends=True))
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(files[name])
    monkeypatch.chdir(tmp_path)
    return files


def rewards(name, texts, **params):
    functions = [RewardFunctionConfig(name=name, params=params)]
    with closing(RewardPool(functions, processes=1, timeout_s=HANG_S)) as pool:
        scores = pool.submit([ScoreRequest(one, "3", "1 + 2 = ?!", {}) for one in texts]).wait()
    assert [score.error for score in scores] == [""] * len(texts)
    return [score.total for score in scores]


def test_the_scorers_of_the_readme_pay_what_it_says(scorers):
    names = {"my_pkg/rewards.py", "my_pkg/judge.py", "my_pkg/diversity.py"}
    assert set(scorers) == names | {"my_pkg/losses.py"}
    assert rewards("my_pkg.rewards:score", ["so 3", "so 4"], bonus=0.1) == [1.0, 0.1]
    assert rewards("my_pkg.diversity:score", ["a", "b", "a"]) == [0.5, 1.0, 0.5]
    server = Server(("127.0.0.1", 0), Judge)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        texts = ["x" * (place % 11) for place in range(50)]
        expected = [len(text) / 10 for text in texts]
        assert rewards("my_pkg.judge:score", texts, url=url) == expected
        server.shutdown()
