"""Makes the page docs/sft_configuration.md from the configuration of supervised training.

Usage: `python -m driver.sft.sft_reference > docs/sft_configuration.md`
"""

import argparse
import sys
from collections.abc import Sequence

from driver.config.config_reference import reference
from driver.sft.sft_config import SftConfig

_HEAD = """\
# Configuration of supervised training

Every key of `python -m learner.sft` ([docs/sft.md](sft.md)). A training is a YAML 1.2 file plus any
number of overrides:

    python -m learner.sft --config sft.yaml --set run.epochs=3

The sections `model`, `data`, `learner` and `checkpoint` are those of a run
([docs/configuration.md](configuration.md)). This page is generated:
`python -m driver.sft.sft_reference > docs/sft_configuration.md`.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return reference(SftConfig, _HEAD)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m driver.sft.sft_reference",
        description="Prints docs/sft_configuration.md: every key of supervised training.",
    )
    parser.parse_args(arguments)
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
