"""The errors that users see. Each message is one line: the thing, what was expected, what came, the remedy.

"No room" is a return value, never an exception; a broken invariant is an `assert`.
"""


class QrtError(Exception):
    """The base of all errors that qrt raises on purpose; commands print it in one line and exit 1."""


class ConfigError(QrtError, ValueError):
    """A setting, flag or parameter is wrong or contradicts another one."""


class UnsupportedError(QrtError):
    """A model, format or device combination that qrt does not run."""


class CheckpointError(QrtError):
    """A checkpoint is missing, damaged, or not what its config says."""


class QueueFullError(QrtError):
    """The queue is full; try again later."""
