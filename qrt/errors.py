"""The errors a user can meet. Each message is one line: the thing, what came, what was wanted, the remedy.

"No room" is a return value, never an exception; a broken invariant is an `assert`.
"""


class QrtError(Exception):
    """Base of everything qrt raises on purpose; command lines print it as one line and exit 1."""


class ConfigError(QrtError, ValueError):
    """A setting, flag or parameter is wrong or contradicts another one."""


class UnsupportedError(QrtError):
    """A model, format or device combination that qrt does not run."""


class CheckpointError(QrtError):
    """A checkpoint is missing, damaged, or not what its config says."""


class QueueFullError(QrtError):
    """As many requests wait as may: try again later."""
