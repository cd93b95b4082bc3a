"""What must be on the disk before anyone is told."""

import os
import pathlib


def sync_folder(folder: pathlib.Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
