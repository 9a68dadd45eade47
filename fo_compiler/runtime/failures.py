"""What a transfer that went wrong is told as, to this rank's user and to the other ranks."""

from __future__ import annotations

from ..errors import TransferError
from .transport import current_transport


def transfer_failure(what: str, label: str, group_name: str, cause: BaseException | str) -> TransferError:
    """The error to raise for a transfer that `what` happened to; the other ranks of the group can read it, too."""
    transport = current_transport()
    line = (str(cause).splitlines() or [type(cause).__name__])[0]
    others = transport.agreements.report_failure(transport, group_name, f"transfer {what}: {label}")
    return TransferError(
        f"transfer {what}: {label}. Cause: {line}. {others} A peer died, was too late for the process group's "
        "timeout, or runs another program; look at the first error among the ranks."
    )
