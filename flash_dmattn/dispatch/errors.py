"""The exceptions and the warning that attention calls raise about backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..backends.protocol import Reason


class BackendError(RuntimeError):
    """A backend that was asked for cannot serve a valid call.

    Attributes:
        backend: name of the backend that was asked for.
        reasons: every reason found, each with the backend's name, a code, the values found and a hint.
        accepted_by: names of the backends that would accept the same call on this machine.
    """

    def __init__(
        self, message: str, *, backend: str, reasons: tuple[Reason, ...] = (), accepted_by: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.reasons = reasons
        self.accepted_by = accepted_by


class BackendUnsupportedError(BackendError):
    """The backend works on this machine but not for this call; `reasons` lists every rule the call breaks."""


class BackendUnavailableError(BackendError):
    """The backend does not work on this machine at all; `__cause__` is the exception met when it was probed."""


class FallbackWarning(UserWarning):
    """`backend="auto"` computes on eager PyTorch on an accelerator, because no kernel backend accepts the call."""
