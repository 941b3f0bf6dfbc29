"""A client of kvstrided, the KV-cache offload daemon, in plain Python. See README.md beside this package."""

from .backend import BACKEND_OVERRIDE, Backend, backend_of, stride_order
from .client import (
    ABSENT, DEFAULT_SOCKET, LOAD_NO_COPY, LOAD_SHARED, NO_SYNC, READY, WATCH_REMOVED, WATCH_RESET, WATCH_STORED, WRITING, CallResult,
    Client, Counters, DecodeCall, Entry, Event, Health, Hello, Lease, LoadResult, Lookup, Opened, Pending, Reset,
    Sync, WriteCall,
)  # fmt: skip
from .errors import (
    AwayError, BufferRefused, CancelledError, DeadlineError, KvstrideError, PartialError, Status, StatusError,
    WireError,
)  # fmt: skip
from .layout import Format, LayoutError, Namespace, Plane, Shard, derive_chain, derive_key, format_of, mla_namespace
from .region import ANY_SLOT, PlaneMap, Region, Slot, make_memfd
from .wire import DAEMON_COUNTER, NONE, ZERO_KEY

__all__ = [name for name in dir() if not name.startswith("_")]
