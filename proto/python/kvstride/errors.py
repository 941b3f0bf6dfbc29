"""What can go wrong, one class a kind.

Everything that this package raises on purpose is a `KvstrideError`, except `BufferRefused`, which is a `ValueError` too.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Status(IntEnum):
    """Statuses of the protocol (section 13), as calls return them; equal to their numbers. One that comes from a newer
    daemon and is not here stays a plain number, and is a failure."""

    OK = 0
    E_PROTO = 1
    E_LIMIT = 2
    E_NOT_FOUND = 3
    E_NO_SPACE = 4
    E_CONFIG = 5
    E_SYS = 6
    E_DEVICE = 7
    E_DEVICE_LOST = 8
    E_VERSION = 9
    E_UNSUPPORTED = 10
    E_DENIED = 11
    E_INVALID = 12
    E_RANGE = 13
    E_STATE = 14
    E_EXISTS = 15
    E_BUSY = 16
    E_DEADLINE = 17
    E_CANCELLED = 18
    E_AWAY = 19
    E_PARTIAL = 20
    E_CORRUPT = 21
    E_NO_MEMORY = 22
    E_STALE = 23


_KNOWN = {int(status): status for status in Status}


def status_of(number: int) -> Status | int:
    """The `Status` of a number; the number itself if it is not known here."""
    return _KNOWN.get(number, number)


def status_name(status: int) -> str:
    """The name of `status`; "status N" for one that is not known here."""
    known = status_of(status)
    return known.name if isinstance(known, Status) else f"status {status}"


class KvstrideError(Exception):
    """Base of all errors of this package."""


class WireError(KvstrideError):
    """Bytes that are not what the protocol says: the daemon's are, or ours would be, malformed."""


class AwayError(KvstrideError):
    """The daemon is not there, closed the connection, or did not answer in time. The connection is closed."""


class BufferRefused(KvstrideError, ValueError):
    """A buffer that cannot take or give a block. No byte has moved."""


def _failed(results: Any) -> str:
    """How many of a list of results failed, and the first of them."""
    if not isinstance(results, list):
        return ""
    states = [getattr(r, "status", r) for r in results]
    bad = [i for i, status in enumerate(states) if status not in (Status.OK, Status.E_EXISTS)]
    return f"{len(bad)} of {len(states)} failed, the first is [{bad[0]}]: {status_name(states[bad[0]])}" if bad else ""


class StatusError(KvstrideError):
    """The daemon refused a request, or it ended badly.

    `status`: a `Status`, or a number that is none; `op`: name of the operation; `message`: the daemon's text, for people;
    `request_id`: id of the request, for `Client.cancel`; `results`: what is known of each item, or None.
    """

    def __init__(self, op: str, status: int, message: str, request_id: int, results: Any = None) -> None:
        said = message or _failed(results)
        super().__init__(f"{op}: {status_name(status)}" + (f": {said}" if said else ""))
        self.op = op
        self.status = status_of(status)
        self.message = message
        self.request_id = request_id
        self.results = results


class PartialError(StatusError):
    """`E_PARTIAL`: some items failed, or all of them; `results` has the status of each."""


class DeadlineError(StatusError):
    """`E_DEADLINE`. Items of `results` that are `E_BUSY` still run: their slots belong to the daemon until
    `Client.cancel(request_id)` has returned."""


class CancelledError(StatusError):
    """`E_CANCELLED`: a CANCEL stopped it."""


def error_for(op: str, status: int, message: str, request_id: int, results: Any = None) -> StatusError:
    """The exception that stands for `status`."""
    kind = {Status.E_PARTIAL: PartialError, Status.E_DEADLINE: DeadlineError, Status.E_CANCELLED: CancelledError}
    return kind.get(status, StatusError)(op, status, message, request_id, results)  # type: ignore[call-overload]
