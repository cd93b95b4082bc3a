"""A server of the Hugging Face hub's rpcs that an upload needs, over loopback."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN = "hf_right"


class HubServer:
    """Takes commits; refuses another token than TOKEN."""

    def __init__(self):
        self.repositories: dict[str, dict] = {}
        self.files: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self._answer(401, {"error": "Invalid username or password."})
                if self.path == "/api/repos/create":
                    return self._answer(200, hub._create(json.loads(body)))
                if self.path.endswith("/preupload/main"):
                    named = [file["path"] for file in json.loads(body)["files"]]
                    return self._answer(200, {"files": [_regular(path) for path in named]})
                return self._answer(200, hub._commit(self.path.split("/commit/")[0], body))

            def _answer(self, status, content):
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def _create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        self.repositories.setdefault(name, asked)
        return {"url": f"{self.address}/{name}", "name": name, "id": name}

    def _commit(self, path, body):
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.files[line["value"]["path"]] = content
        address = f"{self.address}/{path.removeprefix('/api/models/')}/commit/1"
        return {"commitUrl": address, "commitOid": "1", "success": True}

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def _regular(path):
    return {"path": path, "uploadMode": "regular", "shouldIgnore": False}
