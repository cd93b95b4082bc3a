"""A model path that is a hub id, against a small hub on loopback."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from models.files.hf_config import from_hf
from tests.deadlines import HANG_S
from tests.models.tiny_models import HF_CONFIGS, random_named, split, write_folder

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[3]
COMMIT = "a" * 40
LOAD = """
import sys, numpy as np
from models.files.checkpoint import check_model_files, load_model
try:
    check_model_files(sys.argv[1])
    model = load_model(sys.argv[1])
except ValueError as error:
    sys.exit(f"refused: {error}")
print(model.folder)
print(float(model.params["embed_tokens"]["weight"].astype(np.float64).sum()))
"""


def tree_entry(path: pathlib.Path) -> dict:
    return {
        "type": "file",
        "path": path.name,
        "size": path.stat().st_size,
        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
    }


@pytest.fixture
def hub(tmp_path):
    """Serves the files of one folder as `owner/tiny`; `.asked` lists the files fetched."""
    folder = tmp_path / "hub"
    folder.mkdir()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path, headers = self.path.split("?")[0], {}
            names = sorted(item.name for item in folder.iterdir())
            if path.startswith(f"/api/models/owner/tiny/tree/{COMMIT}"):
                body = json.dumps([tree_entry(folder / name) for name in names]).encode()
            elif path.startswith("/api/models/owner/tiny"):
                listing = [{"rfilename": name} for name in names]
                body = json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": listing}).encode()
            elif "/resolve/" in path and path.rsplit("/", 1)[1] in names:
                name = path.rsplit("/", 1)[1]
                if self.command == "GET":
                    self.server.asked.add(name)
                body = (folder / name).read_bytes()
                etag = hashlib.sha1(body).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.folder = set(), folder
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def load_in_a_new_process(hub_id: str, port: int, tmp_path) -> subprocess.CompletedProcess:
    """The hub's address is read when its client is imported."""
    environment = {
        **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_ETAG_TIMEOUT": "2",
    }
    command = [sys.executable, "-c", LOAD, hub_id]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )


def test_a_hub_model_is_fetched_without_what_is_not_needed(hub, tmp_path):
    named = random_named(from_hf(HF_CONFIGS["qwen2"]))
    write_folder(hub.folder, HF_CONFIGS["qwen2"], split(named, 2))
    for unneeded in ("pytorch_model.bin", "README.md", "consolidated.safetensors"):
        (hub.folder / unneeded).write_text("large")
    result = load_in_a_new_process("owner/tiny", hub.server_port, tmp_path)
    assert result.returncode == 0, result.stderr
    folder, total = result.stdout.splitlines()
    assert pathlib.Path(folder).is_relative_to(tmp_path / "cache")
    expected = named["model.embed_tokens.weight"].astype(np.float64).sum()
    assert float(total) == pytest.approx(expected)
    assert hub.asked == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_a_hub_id_that_the_hub_does_not_know_is_refused(hub, tmp_path):
    result = load_in_a_new_process("owner/other", hub.server_port, tmp_path)
    assert result.returncode == 1
    assert "refused: model path 'owner/other' is no folder here" in result.stderr
