"""Making the names in a folder durable."""

import os
import pathlib


def sync_folder(folder: pathlib.Path) -> None:
    """Waits until renames and new files in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
