"""Locks on files, held by one process among all that may open the file."""

import errno
import fcntl

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def lock_file(descriptor: int) -> bool:
    """Locks an open file, without waiting, until it is closed or the process ends.

    Returns:
        False where its file system has no locks: nothing is known of other processes.

    Raises:
        BlockingIOError: while another process holds the lock.
        OSError: if the lock cannot be asked for.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True
