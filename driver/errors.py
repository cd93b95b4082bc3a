"""Errors that end a run and that a user can act on."""


class RunError(Exception):
    """Shown as one message without a traceback; `exit_code` as in `reports/status.py`."""

    exit_code = 1

    def __init__(self, message: str, *, details: str = ""):
        super().__init__(message)
        self.details = details
        """What a developer wants besides, such as the traceback of another process."""
