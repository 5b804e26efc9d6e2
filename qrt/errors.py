"""The errors that users see. Each message is one line: the thing, what was expected, what came, the remedy.

"No room" is a return value, never an exception; a broken invariant is an `assert`.
"""


class QrtError(Exception):
    """The base of all errors that qrt raises on purpose; commands print it in one line and exit 1."""


class ConfigError(QrtError, ValueError):
    """A setting, flag or parameter is wrong or contradicts another one."""


class ContextLengthError(ConfigError):
    """A request has more tokens than the context; its words are those by which clients know it.

    name      what has them: "prompt", or the setting that asks for them
    got       how many they are
    most      how many may be there
    longest   tokens of the context
    bound     what decides that
    """

    def __init__(self, name: str, got: int, most: int, longest: int, bound: str = "max_model_len") -> None:
        super().__init__(name, got, most, longest, bound)
        self.name, self.got, self.most, self.longest, self.bound = name, got, most, longest, bound

    def __str__(self) -> str:
        output = ", one for the output" if self.most < self.longest else ""
        return (
            f"{self.name}: expected at most {self.most} tokens ({self.bound} {self.longest}{output}), "
            f"got {self.got}. This model's maximum context length is {self.longest} tokens; "
            f"shorten the request or raise the {self.bound}"
        )


class UnsupportedError(QrtError):
    """A model, format or device combination that qrt does not run."""


class CheckpointError(QrtError):
    """A checkpoint is missing, damaged, or not what its config says."""


class QueueFullError(QrtError):
    """The queue is full; try again later."""
