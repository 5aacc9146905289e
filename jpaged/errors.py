"""Typed errors. Each message names the offending value and the knob to turn."""


class JpagedError(Exception):
    """Base of every error that jpaged raises on purpose.

    rule: the rule of docs/combinations.md that was broken; None for every other error.
    """

    rule: str | None = None


class ConfigError(JpagedError, ValueError):
    """An engine or model setting that cannot work; nothing has run."""


class UnsupportedError(ConfigError, NotImplementedError):
    """Something that was asked for by name and is not built, or cannot run here."""


class CheckpointError(JpagedError):
    """A checkpoint that is missing, damaged, unsafe or does not fit its config."""


class RequestError(JpagedError, ValueError):
    """One request is malformed; its neighbours are unaffected."""


class CapacityError(RequestError):
    """One request can never fit the KV pool or the model's context, or outgrew the pool while
    running.
    """


class GenerationError(JpagedError):
    """Raised by `generate(on_error="raise")` when requests failed after the others finished.

    outputs: every RequestOutput of the call, in order; those that failed carry `.error`.
    """

    def __init__(self, message: str, outputs: list):
        super().__init__(message)
        self.outputs = outputs

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle both arguments: an exception by itself is made anew of its message alone."""
        return type(self), (str(self), self.outputs), self.__dict__


class NotFiniteError(JpagedError):
    """The probabilities of a request's next token are NaN: its weights, or what they make of this
    prompt, are not finite. Requests that do not meet such numbers go on.
    """


class PeerError(JpagedError):
    """Another process of the same model is gone, late, or runs something else. No call after it can
    succeed: leave this process too.
    """


class ReplicaError(JpagedError):
    """A request, or all of them, lost with the engine of a cluster that ran it, more often than is
    tried again.
    """
