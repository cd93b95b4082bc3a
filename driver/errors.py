"""Errors that end a run and that a user can act on."""


class RunError(Exception):
    """Shown as one message without a traceback; `exit_code` as in `reports/status.py`."""

    exit_code = 1

    def __init__(self, message: str, *, details: str = ""):
        super().__init__(message)
        self.details = details
        """Further information for a developer, such as the traceback of another process."""


class NothingTrained(RunError):
    """The run took all its steps, or its first ones without a single reward, and none of them
    changed the policy.
    """

    exit_code = 4


class NoRun(RunError):
    """The folder is not the output folder of a run."""

    exit_code = 2
