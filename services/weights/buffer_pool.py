"""Large buffers whose memory is used again.

A fresh gigabyte costs a page fault for every 4 KiB, which takes longer than to receive it. A run
moves versions of one size for its whole life, so their memory is reused.
"""

import collections
import mmap
import weakref

import numpy as np

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Memory of this process alone: Python's default is shared with children."""


class BufferPool:
    """Lends buffers, and reuses their memory once no array refers to it."""

    def __init__(self, keep: int):
        """Starts empty.

        Args:
            keep: how many unused buffers it keeps; others are returned to the system.
        """
        self._free: collections.deque[mmap.mmap] = collections.deque(maxlen=keep)

    def take_buffer(self, nbytes: int) -> np.ndarray:
        """Returns writable uint8 [nbytes] with arbitrary content; safe to call from any thread.

        Its memory is not used again before the array and everything made of it without a copy
        (views, memoryviews, device arrays that alias it) is gone.
        """
        memory = self._unused(nbytes) or mmap.mmap(-1, max(nbytes, 1), flags=PRIVATE)
        array = np.frombuffer(memory, np.uint8, nbytes)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array

    def _unused(self, nbytes: int) -> mmap.mmap | None:
        while True:
            try:
                memory = self._free.pop()
            except IndexError:
                return None
            if len(memory) == max(nbytes, 1):
                return memory
