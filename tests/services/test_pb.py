import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTOS = sorted(path.relative_to(ROOT) for path in (ROOT / "proto/tandem/v1").glob("*.proto"))


def without_versions(source: str) -> str:
    """Drops what depends on the generator's patch release and not on the .proto."""
    lines = [line for line in source.splitlines() if "ersion" not in line.split("=")[0]]
    return "\n".join(line for line in lines if not line.strip().rstrip(",").isdigit())


def test_generated_code_is_up_to_date(tmp_path):
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, of the test extra")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iservices/pb=proto/tandem/v1"]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *outputs, *map(str, PROTOS)], cwd=ROOT, check=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / "services/pb").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "services/pb").glob("*_pb2*")}
    assert sorted(committed) == sorted(fresh)
    for name, source in fresh.items():
        assert without_versions(committed[name]) == without_versions(source), (
            f"services/pb/{name} is not what proto/ says: run `make proto`"
        )


def test_proto_folder_is_no_python_package():
    assert not list((ROOT / "proto").rglob("__init__.py"))
