"""A blocking client.

One `Client` is one connection, for one thread at a time. Every call sends a request and waits for its reply, no longer
than its deadline and a grace; requests that wait for a counter may be sent with `submit_load`, `submit_store`,
`submit_write`, `submit_decode` and `submit_extend` instead, which return a `Pending`.

Times are seconds. Errors: `StatusError` and its children for what the daemon answers, `AwayError` when it is gone or
silent (the connection is closed then), `WireError` for what breaks the protocol.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import mmap
import os
import select
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Any, Iterator, NamedTuple, Sequence

from . import wire
from .errors import AwayError, KvstrideError, Status, StatusError, WireError, error_for, status_of
from .layout import Namespace
from .region import ANY_SLOT, PlaneMap, Region, Slot, bytes_of
from .wire import NONE, ZERO_KEY, Op

LOAD_SHARED = 1
"""Flag of a `LoadResult`: the slot is shared, and the caller has a hold on it."""
LOAD_NO_COPY = 2
"""Flag of a `LoadResult`: the block was on the device already."""
ABSENT, WRITING, READY = 0, 1, 2
"""States that LOOKUP tells."""
WATCH_STORED, WATCH_REMOVED, WATCH_RESET = 1, 2, 4
"""Bits of `Client.watch`."""
DEFAULT_SOCKET = "/run/kvstrided/kvstrided.sock"
"""Where an installed daemon is: for a `Client` without a path, unless KVSTRIDE_SOCKET is in the environment."""
SECTIONS = {"summary": 0, "clients": 1, "leases": 2, "keys": 3, "namespaces": 4, "fsck": 5, "tenants": 6, "metrics": 7}
"""Sections of `Client.status`."""

_SPACE = socket.CMSG_SPACE(wire.MAX_FDS * 4)
_LATE_ROUNDS = 64


class Hello(NamedTuple):
    """What the daemon grants; section 12, HELLO. `devices`: the UUID of each, by number, if feature 2 was asked for."""

    version: int
    is_admin: int
    n_counters: int
    features: int
    boot_id: bytes
    conn_id: int
    max_body: int
    max_keys: int
    credit_requests: int
    control_requests: int
    credit_bytes: int
    default_deadline_us: int
    max_deadline_us: int
    devices: tuple[bytes, ...] = ()


class Opened(NamedTuple):
    """An open namespace: its number `ns`, the bytes of a block, and its description."""

    ns: int
    slot_bytes: int
    digest: bytes
    namespace: Namespace


class Lookup(NamedTuple):
    """`n_hits` leading READY keys, and the state of each key."""

    n_hits: int
    states: list[int]


class Lease(NamedTuple):
    """`n_leased` leading keys held in each namespace for `ttl_ms`; with 0 there is no lease."""

    lease: bytes
    n_leased: int
    ttl_ms: int
    bytes: int


class LoadResult(NamedTuple):
    """Of one block: status, `LOAD_*` flags, and where it is (slot `NONE`: nowhere)."""

    status: Status | int
    flags: int
    slot: int
    gen: int

    @property
    def ref(self) -> Slot:
        """The slot, as `slot_drop` takes it."""
        return Slot(self.slot, self.gen)


class CallResult(NamedTuple):
    """Of one WRITE, DECODE or EXTEND call."""

    status: Status | int
    parts: int
    kernel: int
    bad: int


class Entry(NamedTuple):
    """A slot that is offered again: `flags` 1: shared, with `key` at `depth` of its chain; 0: private."""

    slot: int
    gen: int
    flags: int = 0
    depth: int = 0
    key: bytes = ZERO_KEY


class Reset(NamedTuple):
    """What RESET did, in blocks and leases."""

    dropped: int
    aborted: int
    kept: int
    leases: int


class Health(NamedTuple):
    """`state`: 0 ok, 1 starting, 2 degraded, 3 draining."""

    state: int
    reasons: int
    uptime_us: int
    boot_id: bytes


class Event(NamedTuple):
    """One change. `type`: 0 stored, 1 removed, 2 reset; `cause` of a removal: 1 evicted, 2 dropped, 3 rebound;
    `seq`: number of its frame, from 1; `lost`: events left out so far because this client was slow."""

    type: int
    ns: int
    depth: int
    cause: int
    key: bytes
    seq: int
    lost: int


class Sync(NamedTuple):
    """When a job begins and what it signals: counters are indices or `NONE`, values below 2^62. An `after_counter`
    with `wire.DAEMON_COUNTER` added is one of the daemon's half."""

    after_counter: int = NONE
    after_value: int = 0
    signal_counter: int = NONE
    signal_value: int = 0


NO_SYNC = Sync()


class WriteCall(NamedTuple):
    """Rows of one plane: byte offsets in the `scratch` region (its number) and byte strides from token to token.

    `src_type` 1 bf16, 2 fp16, 3 fp32, 0 the plane's own (bf16 for fp8); `kv_scale`, of mla_fp8 alone: what a stored
    1.0 stands for."""

    plane: int
    scratch: int
    kv_c_offset: int
    kv_c_stride: int
    k_pe_offset: int
    k_pe_stride: int
    src_type: int = 0
    kv_scale: float = 0.0


class DecodeCall(NamedTuple):
    """Attention over one plane. Queries, output and lse lie in the `scratch` region (its number): byte offset of the
    first value, byte strides from query row to query row (`*_token`) and from head to head (`*_head`).

    q_nope [T][h_q][512], q_pe [T][h_q][64] and out [T][h_q][512] in the plane's type (bf16 for fp8), lse [T][h_q] f32,
    with T = sequences x s_q, or all query tokens of an EXTEND. `kv_scale`: as in `WriteCall`."""

    plane: int
    scratch: int
    sm_scale: float
    q_nope_offset: int
    q_nope_token: int
    q_nope_head: int
    q_pe_offset: int
    q_pe_token: int
    q_pe_head: int
    out_offset: int
    out_token: int
    out_head: int
    lse_offset: int
    lse_token: int
    lse_head: int
    parts: int = 0
    after_counter: int = NONE
    after_value: int = 0
    signal_counter: int = NONE
    signal_value: int = 0
    kv_scale: float = 0.0


class Pending:
    """A request on its way. `id` is what `Client.cancel` takes."""

    def __init__(self, client: Client, op: Op, request_id: int, until: float, signals: Sequence[int]) -> None:
        self._client = client
        self.op = op
        self.id = request_id
        self._until = until
        self._signals = signals
        self._frame: wire.Frame | None = None
        self._forgotten = False  # nobody takes what the reply brings

    @property
    def done(self) -> bool:
        """The reply is here. Does not look at the socket: see `Client.poll`."""
        return self._frame is not None

    def wait(self, *, partial: bool = False) -> Any:
        """The results, once the reply is here: of LOAD a list of `LoadResult`, of STORE a list of statuses, of
        WRITE, DECODE and EXTEND a list of `CallResult`. With `partial`, `E_PARTIAL` is returned too, not raised."""
        parsed = self._client._finish(self, partial)
        return _results(self.op, parsed)


class Counters:
    """The counter page: 256 entries written by the client, 256 by the daemon."""

    def __init__(self, fd: int) -> None:
        """Maps the page; the descriptor stays the caller's. WireError: another size."""
        size = os.fstat(fd).st_size
        if size != wire.COUNTER_PAGE_BYTES:
            raise WireError(f"counter page of {size} bytes, not {wire.COUNTER_PAGE_BYTES}")
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED)
        self._words = memoryview(self._map).cast("Q")
        self._fence = threading.Lock()

    def advance(self, index: int, value: int) -> None:
        """Raise entry `index` (0..255) of the client's half to `value`, after all writes before this call."""
        at = self._entry(index, 0)
        if not self._words[at] <= value < wire.COUNTER_LIMIT:
            raise ValueError(f"counter {index}: {value} is below {self._words[at]} or not below 2^62")
        with self._fence:  # Taking and giving back a lock orders the stores around it on every machine.
            pass
        self._words[at] = value

    def signalled(self, index: int) -> tuple[int, int]:
        """Value and error word of entry `index` of the daemon's half; what its job wrote is valid if the error is 0."""
        at = self._entry(index, wire.COUNTERS)
        value = self._words[at]
        with self._fence:
            pass
        return value, self._words[at + 1]

    def clear_error(self, index: int) -> None:
        """Set the error word of the daemon's entry `index` to 0. Only while no job in flight signals it."""
        self._words[self._entry(index, wire.COUNTERS) + 1] = 0

    def _lose(self, index: int) -> None:
        at = self._entry(index, wire.COUNTERS)
        self._words[at + 1] = Status.E_AWAY
        with self._fence:
            pass
        self._words[at] = (1 << 63) - 1

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._map.close()

    @staticmethod
    def _entry(index: int, half: int) -> int:
        if not 0 <= index < wire.COUNTERS:
            raise IndexError(f"counter {index}: 0..{wire.COUNTERS - 1}")
        return (half + index) * 2


class Client:
    """A connection to the daemon, and the regions that it mapped."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, name: str = "python", timeout: float = 10.0,
        deadline: float | None = None, grace: float = 5.0, features: int = 0,
    ) -> None:  # fmt: skip
        """Connect to the socket at `path` and say HELLO. None: at $KVSTRIDE_SOCKET, else at `DEFAULT_SOCKET`.

        `name`: shown to operators, at most 64 bytes; `timeout`: for connecting and HELLO together; `deadline`: of
        requests that name none, None: the daemon's default; `grace`: how long behind its deadline a reply may come
        before the daemon counts as gone; `features`: `wire.FEATURE_*` bits. AwayError: nobody there; StatusError:
        refused, as `E_VERSION`.
        """
        self._path = os.fspath(path if path is not None else os.environ.get("KVSTRIDE_SOCKET") or DEFAULT_SOCKET)
        self._deadline, self._grace = deadline, grace
        self._reader = wire.FrameReader()
        self._pending: dict[int, Pending] = {}
        self._out: collections.deque[tuple[memoryview, list[int]]] = collections.deque()
        self._events: collections.deque[Event] = collections.deque()
        self._next_id = 1
        self._why: str | None = None
        self._lost: Exception | None = None
        self._regions: dict[int, Region] = {}
        self.counters: Counters | None = None
        until = time.monotonic() + timeout
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._sock.settimeout(timeout)
            try:
                self._sock.connect(self._path)
            except OSError as error:
                text = error.strerror or f"{error}: {len(os.fsencode(self._path))} bytes, 107 at most"
                raise AwayError(f"{self._path}: {text}") from error
            self._sock.setblocking(False)
            text = name.encode()
            body = _pack(
                Op.HELLO, {"name": text}, version_min=1, version_max=1, pid=os.getpid(), features=features,
                name_len=len(text),
            )  # fmt: skip
            pending = self._submit(Op.HELLO, body, deadline=timeout, until=until)
            parsed = self._finish(pending, False)
            fds = parsed.fds
            try:
                if len(fds) != 1:
                    raise WireError(f"HELLO: {len(fds)} descriptors, not 1")
                self.counters = Counters(fds[0])
            finally:
                _close_all(fds)
            self.hello = Hello(*parsed.row, tuple(d.uuid for d in parsed.arrays.get("device", ())))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """The connection is gone, closed here or lost."""
        return self._why is not None

    def close(self) -> None:
        """End the connection: leases, holds, private slots and waiting jobs go with it. Unmaps its regions and the
        counter page. KvstrideError: the caller still holds a view of a region; all else is unmapped, and a call after
        its release unmaps that as well."""
        self._drop("closed")
        failed: KvstrideError | None = None
        for number, region in list(self._regions.items()):
            try:
                region.close()
                del self._regions[number]
            except KvstrideError as error:
                failed = error
        if self.counters:
            self.counters.close()
            self.counters = None
        if failed is not None:
            raise failed

    # Namespaces and regions.

    def open(self, namespace: Namespace, *, deadline: float | None = None) -> Opened:
        """Find or make a namespace. WireError: the daemon's digest is another one than ours."""
        row = self._call(Op.OPEN, namespace.canonical(), deadline).row
        if row.digest != namespace.digest() or row.slot_bytes != namespace.slot_bytes:
            raise WireError("OPEN: digest or slot_bytes differ from our own")
        return Opened(row.ns, row.slot_bytes, row.digest, namespace)

    def region_create(
        self, opened: Opened, n_slots: int, *, device: int = 0, deadline: float | None = None
    ) -> Region:
        """A daemon region of `n_slots` zero-filled slots, mapped."""
        body = _pack(Op.REGION_CREATE, ns=opened.ns, kind=0, device=device, n_slots=n_slots)
        return self._map_region(opened, self._call(Op.REGION_CREATE, body, deadline))

    def scratch_create(self, nbytes: int, *, device: int = 0, deadline: float | None = None) -> Region:
        """A scratch region of `nbytes` zero bytes, mapped."""
        body = _pack(Op.REGION_CREATE, ns=NONE, kind=1, device=device, bytes=nbytes)
        return self._map_region(None, self._call(Op.REGION_CREATE, body, deadline))

    def region_attach(
        self, opened: Opened | None, token: bytes, *, device: int = 0, deadline: float | None = None
    ) -> Region:
        """Sit down in a live region of the tenant by its 16-byte token, and map it; `opened`: None for scratch."""
        ns, kind = (opened.ns, 0) if opened else (NONE, 1)
        body = _pack(Op.REGION_ATTACH, ns=ns, kind=kind, device=device, mode=0, token=token)
        return self._map_region(opened, self._call(Op.REGION_ATTACH, body, deadline))

    def region_reoffer(
        self, opened: Opened | None, region: Region, entries: Sequence[Entry] = (), *, device: int = 0,
        deadline: float | None = None,
    ) -> tuple[Region, list[Status | int]]:  # fmt: skip
        """Offer a daemon region of an earlier life of the daemon, still mapped (`region` may be another client's, but
        not closed), with the slots that are still in use; `opened`: its namespace, opened again. Returns the region
        on this connection, which takes nothing from `region`, and a `Status` an entry: look at each."""
        ns, kind = (opened.ns, 0) if opened else (NONE, 1)
        body = _pack(
            Op.REGION_ATTACH, {"entry": entries}, ns=ns, kind=kind, device=device, n_slots=region.n_slots,
            bytes=region.nbytes, mode=1, n_entries=len(entries), token=region.token,
        )  # fmt: skip
        answer = self._call(Op.REGION_ATTACH, body, deadline, fds=region.fds, partial=True)
        return self._map_region(opened, answer), _statuses(answer)

    def region_import(
        self, opened: Opened, n_slots: int, fds: Sequence[int], maps: Sequence[PlaneMap] | None = None, *,
        device: int = 0, deadline: float | None = None,
    ) -> Region:  # fmt: skip
        """Give the daemon memory of our own: memfds as `make_memfd` makes them (they stay the caller's).

        `maps`: one for whole blocks, or one a plane in plane order; None: whole blocks from the start of `fds[0]`.
        """
        planes = opened.namespace.planes
        maps = [PlaneMap(0, 0, opened.slot_bytes)] if maps is None else list(maps)
        body = _pack(
            Op.REGION_IMPORT, {"map": maps}, ns=opened.ns, device=device, n_slots=n_slots, memory=0, n_maps=len(maps),
            n_ipc=0,
        )
        pages = [opened.slot_bytes] if len(maps) == 1 else [p.page_bytes for p in planes]
        mine = _dup_all(fds)
        try:
            row = self._call(Op.REGION_IMPORT, body, deadline, fds=fds).row
        except BaseException:
            _close_all(mine)
            raise
        with self._unwanted(row.region):
            region = Region(
                row.region, opened.ns, n_slots, opened.slot_bytes, row.bytes, row.token, mine, maps=maps, pages=pages
            )
        self._regions[region.number] = region
        return region

    def region_close(self, region: Region, *, deadline: float | None = None) -> None:
        """Leave a region, here and at the daemon: its private slots are freed and its holds end."""
        self._call(Op.REGION_CLOSE, _pack(Op.REGION_CLOSE, region=region.number), deadline)
        self._regions.pop(region.number, None)
        region.close()

    # Keys.

    def lookup(self, opened: Opened, keys: Sequence[bytes], *, deadline: float | None = None) -> Lookup:
        """Which of `keys` (32 bytes each, in prefix order) are in the pool. Changes nothing."""
        body = _pack(Op.LOOKUP, {"key": keys}, ns=opened.ns, n_keys=len(keys))
        answer = self._call(Op.LOOKUP, body, deadline)
        return Lookup(answer.row.n_hits, list(answer.arrays["state"]))

    def reserve(
        self, namespaces: Sequence[Opened], keys: Sequence[bytes], *, max_loads: int = 1, ttl_ms: int = 0,
        deadline: float | None = None,
    ) -> Lease:  # fmt: skip
        """Hold the leading READY keys against eviction. `ttl_ms` 0: the daemon's longest."""
        arrays = {"ns": [o.ns for o in namespaces], "key": keys}
        body = _pack(
            Op.RESERVE, arrays, n_ns=len(namespaces), n_keys=len(keys), max_loads=max_loads, ttl_ms=ttl_ms
        )
        return Lease(*self._call(Op.RESERVE, body, deadline).row)

    def release(self, lease: Lease | bytes, *, deadline: float | None = None) -> None:
        """End a lease."""
        name = lease.lease if isinstance(lease, Lease) else lease
        self._call(Op.RELEASE, _pack(Op.RELEASE, lease=name), deadline)

    def pin(
        self, opened: Opened, keys: Sequence[bytes], *, partial: bool = False, deadline: float | None = None
    ) -> list[Status | int]:
        """Keep resident blocks for good. Returns a `Status` a key; PartialError unless all are OK or `partial`."""
        return self._keys(Op.PIN, opened, keys, partial, deadline)

    def unpin(
        self, opened: Opened, keys: Sequence[bytes], *, partial: bool = False, deadline: float | None = None
    ) -> list[Status | int]:
        """Undo `pin`."""
        return self._keys(Op.UNPIN, opened, keys, partial, deadline)

    def drop(
        self, opened: Opened, keys: Sequence[bytes], *, partial: bool = False, deadline: float | None = None
    ) -> list[Status | int]:
        """Remove keys; `E_BUSY` of a key: leased or pinned."""
        return self._keys(Op.DROP, opened, keys, partial, deadline)

    def reset(self, opened: Opened | None = None, *, pinned: bool = False, deadline: float | None = None) -> Reset:
        """Remove every key of a namespace (None: of all); blocks that are pinned only with `pinned`. What was kept
        is told in the result, not raised."""
        body = _pack(Op.RESET, ns=opened.ns if opened else NONE, flags=int(pinned))
        return Reset(*self._call(Op.RESET, body, deadline, partial=True).row)

    # Slots and copies.

    def slot_take(self, region: Region, n: int, *, deadline: float | None = None) -> list[Slot]:
        """`n` free slots, private, with undefined contents; all or none."""
        answer = self._call(Op.SLOT_TAKE, _pack(Op.SLOT_TAKE, region=region.number, n=n), deadline)
        return [Slot(*s) for s in answer.arrays["slot"]]

    def slot_drop(
        self, region: Region, slots: Sequence[Slot], *, after_counter: int = NONE, after_value: int = 0,
        partial: bool = False, deadline: float | None = None,
    ) -> list[Status | int]:  # fmt: skip
        """Free private slots, end a hold of shared ones, when the counter is reached. Returns a `Status` a slot."""
        body = _pack(
            Op.SLOT_DROP, {"slot": slots}, region=region.number, n=len(slots), after_counter=after_counter,
            after_value=after_value,
        )  # fmt: skip
        return _statuses(self._call(Op.SLOT_DROP, body, deadline, partial=partial))

    def submit_load(
        self, opened: Opened, region: Region, keys: Sequence[bytes], slots: Sequence[Slot] | None = None, *,
        lease: Lease | bytes | None = None, lease_first: int = 0, n: int | None = None, sync: Sync = NO_SYNC,
        deadline: float | None = None,
    ) -> Pending:  # fmt: skip
        """Send a LOAD. `slots`: one a block, None: the daemon's choice. With `lease`, `keys` is empty and `n` blocks
        (None: as many as `slots`) come from it, from `lease_first` on."""
        count = len(keys) if lease is None else (n if n is not None else len(slots or ()))
        slots = [ANY_SLOT] * count if slots is None else list(slots)
        name = lease.lease if isinstance(lease, Lease) else lease
        body = _pack(
            Op.LOAD, {"key": keys, "slot": slots}, ns=opened.ns, region=region.number, n=count,
            flags=int(lease is not None), lease=name or bytes(16), lease_first=lease_first, **sync._asdict(),
        )  # fmt: skip
        return self._submit(Op.LOAD, body, deadline=deadline, signals=[sync.signal_counter])

    def load(
        self, opened: Opened, region: Region, keys: Sequence[bytes], slots: Sequence[Slot] | None = None, *,
        partial: bool = False, **options: Any,
    ) -> list[LoadResult]:  # fmt: skip
        """Blocks into slots, a result a block; options of `submit_load`. PartialError: a block failed and not
        `partial`; its `results` name the slots that were filled, which the caller still holds."""
        return self.submit_load(opened, region, keys, slots, **options).wait(partial=partial)

    def submit_store(
        self, opened: Opened, region: Region, keys: Sequence[bytes], slots: Sequence[Slot], *, keep: bool = False,
        first_depth: int = 0, parent: bytes = ZERO_KEY, sync: Sync = NO_SYNC, deadline: float | None = None,
    ) -> Pending:  # fmt: skip
        """Send a STORE of `slots` under `keys`, in prefix order; the first key has `first_depth` blocks before it,
        the last of which is `parent`. `keep`: the slots become shared."""
        body = _pack(
            Op.STORE, {"key": keys, "slot": slots}, ns=opened.ns, region=region.number, n=len(keys), flags=int(keep),
            first_depth=first_depth, parent=parent, **sync._asdict(),
        )  # fmt: skip
        return self._submit(Op.STORE, body, deadline=deadline, signals=[sync.signal_counter])

    def store(
        self, opened: Opened, region: Region, keys: Sequence[bytes], slots: Sequence[Slot], *, partial: bool = False,
        **options: Any,
    ) -> list[Status | int]:  # fmt: skip
        """Slots into blocks; options of `submit_store`. Returns a `Status` a key: `OK`, or `E_EXISTS`:
        the key keeps the bytes that it has, these were not moved."""
        return self.submit_store(opened, region, keys, slots, **options).wait(partial=partial)

    def store_buffers(
        self, opened: Opened, region: Region, keys: Sequence[bytes], buffers: Sequence[Any], *, itemsize: int = 1,
        first_depth: int = 0, parent: bytes = ZERO_KEY, deadline: float | None = None,
    ) -> list[Status | int]:  # fmt: skip
        """Store one contiguous buffer of at least `slot_bytes` bytes a key: through slots of a daemon region that are
        taken and given back. Returns what `store` does. BufferRefused: before any byte moved or any request was sent."""
        _same_length(keys, buffers)
        for i, buffer in enumerate(buffers):
            bytes_of(buffer, opened.slot_bytes, writable=False, itemsize=itemsize, what=f"buffers[{i}]")
        slots = self.slot_take(region, len(keys), deadline=deadline)
        try:
            for slot, buffer in zip(slots, buffers):
                region.write_slot(slot.slot, buffer, itemsize=itemsize)
            return self.store(
                opened, region, keys, slots, first_depth=first_depth, parent=parent, deadline=deadline
            )
        except StatusError as error:
            self._settle(error)
            raise
        finally:
            if not self.closed:
                self.slot_drop(region, slots, partial=True)

    def load_buffers(
        self, opened: Opened, region: Region, keys: Sequence[bytes], buffers: Sequence[Any], *, itemsize: int = 1,
        deadline: float | None = None,
    ) -> None:  # fmt: skip
        """Load each key into the first `slot_bytes` bytes of a writable contiguous buffer, through slots of a daemon
        region. BufferRefused: before any byte moved; PartialError: a block failed, and no buffer was written."""
        _same_length(keys, buffers)
        for i, buffer in enumerate(buffers):
            bytes_of(buffer, opened.slot_bytes, writable=True, itemsize=itemsize, what=f"buffers[{i}]")
        held: list[Slot] = []
        try:
            results = self.load(opened, region, keys, deadline=deadline)
            held = [r.ref for r in results]
            for slot, buffer in zip(held, buffers):
                region.read_slot(slot.slot, buffer, itemsize=itemsize)
        except StatusError as error:
            self._settle(error)
            held = [r.ref for r in error.results or () if r.status == Status.OK]
            raise
        finally:
            if held and not self.closed:
                self.slot_drop(region, held, partial=True)

    # Kernels.

    def submit_write(
        self, opened: Opened, region: Region, calls: Sequence[WriteCall], slot_mapping: Sequence[int], *,
        sync: Sync = NO_SYNC, deadline: float | None = None,
    ) -> Pending:  # fmt: skip
        """Send a WRITE: row t of each call goes to place `slot_mapping[t]` = slot x tokens_per_block + place in the
        block; a negative one is skipped."""
        body = _pack(
            Op.WRITE, {"call": calls, "slot_mapping": slot_mapping}, ns=opened.ns, region=region.number,
            n_tokens=len(slot_mapping), n_calls=len(calls), **sync._asdict(),
        )  # fmt: skip
        return self._submit(Op.WRITE, body, deadline=deadline, signals=[sync.signal_counter])

    def write(
        self, opened: Opened, region: Region, calls: Sequence[WriteCall], slot_mapping: Sequence[int], *,
        partial: bool = False, **options: Any,
    ) -> list[CallResult]:  # fmt: skip
        """Write rows of new tokens; options of `submit_write`. Returns a result a call."""
        return self.submit_write(opened, region, calls, slot_mapping, **options).wait(partial=partial)

    def submit_decode(
        self, opened: Opened, region: Region, calls: Sequence[DecodeCall], seq_len: Sequence[int],
        block_table: Sequence[Sequence[int]], *, h_q: int, s_q: int = 1, fixed_split: bool = False,
        deadline: float | None = None,
    ) -> Pending:  # fmt: skip
        """Send a DECODE: `seq_len` tokens of each sequence, the new ones included; `block_table`: a row of slots each,
        all of one length. ValueError: rows of several lengths."""
        width = len(block_table[0]) if block_table else 0
        if len(block_table) != len(seq_len) or any(len(row) != width for row in block_table):
            raise ValueError("block_table: one row a sequence, all of one length")
        body = _pack(
            Op.DECODE,
            {"call": calls, "seq_len": seq_len, "block_table": [slot for row in block_table for slot in row]},
            ns=opened.ns, region=region.number, n_seqs=len(seq_len), table_width=width, s_q=s_q, h_q=h_q,
            n_calls=len(calls), flags=int(fixed_split),
        )  # fmt: skip
        return self._submit(Op.DECODE, body, deadline=deadline, signals=[c.signal_counter for c in calls])

    def decode(
        self, opened: Opened, region: Region, calls: Sequence[DecodeCall], seq_len: Sequence[int],
        block_table: Sequence[Sequence[int]], *, h_q: int, partial: bool = False, **options: Any,
    ) -> list[CallResult]:  # fmt: skip
        """Attention, a result a call; options of `submit_decode`."""
        return self.submit_decode(opened, region, calls, seq_len, block_table, h_q=h_q, **options).wait(
            partial=partial
        )

    def submit_extend(
        self, opened: Opened, region: Region, calls: Sequence[DecodeCall], q_start: Sequence[int],
        seq_len: Sequence[int], block_table: Sequence[Sequence[int]], *, h_q: int, n_tokens: int | None = None,
        fixed_split: bool = False, deadline: float | None = None,
    ) -> Pending:  # fmt: skip
        """Send an EXTEND: queries `q_start[i]` .. `q_start[i + 1] - 1` are sequence `i`'s, the last of its `seq_len`
        tokens; `block_table` as for a DECODE. `n_tokens`: rows of the operands, if more than the queries. ValueError:
        lists that do not fit one another."""
        width = len(block_table[0]) if block_table else 0
        if len(block_table) != len(seq_len) or any(len(row) != width for row in block_table):
            raise ValueError("block_table: one row a sequence, all of one length")
        if len(q_start) != len(seq_len) + 1:
            raise ValueError("q_start: one more than there are sequences")
        table = [slot for row in block_table for slot in row]
        body = _pack(
            Op.EXTEND,
            {"call": calls, "q_start": q_start, "seq_len": seq_len, "block_table": table},
            ns=opened.ns, region=region.number, n_seqs=len(seq_len), table_width=width,
            n_tokens=q_start[-1] if n_tokens is None else n_tokens, h_q=h_q, n_calls=len(calls), flags=int(fixed_split),
        )  # fmt: skip
        return self._submit(Op.EXTEND, body, deadline=deadline, signals=[c.signal_counter for c in calls])

    def extend(
        self, opened: Opened, region: Region, calls: Sequence[DecodeCall], q_start: Sequence[int],
        seq_len: Sequence[int], block_table: Sequence[Sequence[int]], *, h_q: int, partial: bool = False,
        **options: Any,
    ) -> list[CallResult]:  # fmt: skip
        """Attention of ragged queries, a result a call; options of `submit_extend`."""
        return self.submit_extend(opened, region, calls, q_start, seq_len, block_table, h_q=h_q, **options).wait(
            partial=partial
        )

    # Everything else.

    def cancel(self, request: Pending | int) -> int:
        """Stop a request. Returns 0: not in flight, 1: stopped, 2: it had finished. When this returns, the slots of
        the request are the caller's again. Waits as long as the hardware takes."""
        target = request.id if isinstance(request, Pending) else request
        pending = self._submit(Op.CANCEL, _pack(Op.CANCEL, target=target), deadline=None, until=math.inf)
        return self._finish(pending, False).row.outcome

    def status(
        self, section: str = "summary", *, limit: int = 0, opened: Opened | None = None, cursor: int = 0,
        deadline: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Numbers of the daemon, one of `SECTIONS`; all but "summary" need the admin socket. ValueError: no section."""
        if section not in SECTIONS:
            raise ValueError(f"section: {section!r} is not one of {', '.join(SECTIONS)}")
        body = _pack(
            Op.STATUS, section=SECTIONS[section], limit=limit, ns=opened.ns if opened else NONE, cursor=cursor
        )
        text = self._call(Op.STATUS, body, deadline).arrays["text"]
        try:
            return json.loads(text)
        except ValueError as error:
            raise WireError(f"STATUS: {error}") from None

    def health(self, *, deadline: float | None = None) -> Health:
        """Is the daemon well?"""
        return Health(*self._call(Op.HEALTH, b"", deadline).row)

    def ping(self, data: bytes = b"", *, deadline: float | None = None) -> bytes:
        """`data` (0..64 bytes), there and back."""
        return self._call(Op.PING, data, deadline).raw

    def watch(self, mask: int = WATCH_STORED | WATCH_REMOVED | WATCH_RESET, *, deadline: float | None = None) -> None:
        """Ask for events, `WATCH_*` bits; 0 ends it."""
        self._call(Op.WATCH, _pack(Op.WATCH, mask=mask), deadline)

    def events(self, timeout: float) -> Iterator[Event]:
        """Events as they come, until none has come for `timeout` seconds."""
        while True:
            self._pump(time.monotonic() + timeout, lambda: bool(self._events))
            if not self._events:
                return
            yield self._events.popleft()

    def poll(self) -> None:
        """Read what has come, without waiting."""
        self._pump(0.0, lambda: False)

    def wait_signal(self, index: int, value: int, timeout: float) -> int:
        """Wait until the daemon's counter `index` is at least `value`; its error word. TimeoutError."""
        until, nap = time.monotonic() + timeout, 0.00005
        while True:
            if self.counters is None:
                raise AwayError("the connection is closed")
            seen, error = self.counters.signalled(index)
            if seen >= value:
                return error
            if self.closed:
                raise AwayError(self._why)
            if time.monotonic() > until:
                raise TimeoutError(f"counter {index} is {seen}, not {value}, after {timeout} s")
            self._pump(time.monotonic() + nap, lambda: False)
            nap = min(nap * 2, 0.005)

    # The connection.

    def _keys(
        self, op: Op, opened: Opened, keys: Sequence[bytes], partial: bool, deadline: float | None
    ) -> list[Status | int]:
        body = _pack(op, {"key": keys}, ns=opened.ns, n=len(keys))
        return _statuses(self._call(op, body, deadline, partial=partial))

    def _settle(self, error: StatusError) -> None:
        """Wait until no item of a request that ran out of time is in the daemon's hands."""
        if error.status == Status.E_DEADLINE and not self.closed:
            self.cancel(error.request_id)

    def _map_region(self, opened: Opened | None, answer: _Answer) -> Region:
        row, fds = answer.row, answer.fds
        with self._unwanted(row.region):
            if len(fds) != row.n_pieces:
                _close_all(fds)
                raise WireError(f"region {row.region}: {len(fds)} descriptors of {row.n_pieces} pieces")
            region = Region(
                row.region, opened.ns if opened else NONE, row.n_slots, opened.slot_bytes if opened else 0, row.bytes,
                row.token, fds, piece_bytes=row.piece_bytes, slot_stride=row.slot_stride,
            )  # fmt: skip
        self._regions[region.number] = region
        return region

    @contextlib.contextmanager
    def _unwanted(self, number: int) -> Iterator[None]:
        """A region that cannot be mapped here: the daemon must not keep memory for it that has no name."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(KvstrideError):
                self._submit(Op.REGION_CLOSE, _pack(Op.REGION_CLOSE, region=number), deadline=None)
            raise

    def _call(
        self, op: Op, body: bytes, deadline: float | None, *, fds: Sequence[int] = (), partial: bool = False
    ) -> _Answer:
        pending = self._submit(op, body, deadline=deadline, fds=fds)
        try:
            return self._finish(pending, partial)
        except BaseException:  # interrupted: what comes later is nobody's
            pending._forgotten = True
            if pending._frame is not None:
                _close_all(pending._frame.fds)
            raise

    def _submit(
        self, op: Op, body: bytes, *, deadline: float | None, fds: Sequence[int] = (), signals: Sequence[int] = (),
        until: float | None = None,
    ) -> Pending:  # fmt: skip
        if self.closed:
            raise AwayError(self._why)
        if len(fds) > wire.MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors: at most {wire.MAX_FDS}")
        if op != Op.HELLO and len(body) > self.hello.max_body:  # it would cost the connection
            raise WireError(f"{op.name}: a body of {len(body)} bytes; the daemon takes {self.hello.max_body}")
        deadline = self._deadline if deadline is None else deadline
        deadline_us = 0
        if deadline is not None:
            if not 0 < deadline < 1e12:
                raise ValueError(f"deadline {deadline}: more than 0 s")
            deadline_us = max(1, int(deadline * 1e6))
        if until is None:
            longest = self.hello.max_deadline_us / 1e6
            wait = self.hello.default_deadline_us / 1e6 if deadline is None else min(deadline, longest)
            until = time.monotonic() + wait + self._grace
        pending = Pending(self, op, self._next_id, until, [s for s in signals if s != NONE])
        frame = wire.pack_frame(op, pending.id, body, n_fds=len(fds), deadline_us=deadline_us)
        mine = _dup_all(fds)  # ours until they are sent: the caller may close its own meanwhile
        self._next_id += 1
        self._pending[pending.id] = pending
        self._out.append((memoryview(frame), mine))
        self._pump(until, lambda: not self._out)  # all of it: the daemon may drop who pauses in a large one
        return pending

    def _finish(self, pending: Pending, partial: bool) -> _Answer:
        self._pump(pending._until, lambda: pending.done)
        frame = pending._frame
        if frame is None:
            self._drop(f"{pending.op.name}: no answer in time")
            raise AwayError(self._why)
        try:
            message, payload = wire.unpack_reply(frame.body)
            answer = _Answer(None, {}, payload, frame.fds)
            layout = wire.REPLIES[pending.op]
            needed = frame.status in (Status.OK, Status.E_PARTIAL)
            if layout is not None and (payload or (needed and layout.table)):
                parsed = layout.unpack(payload)
                answer = _Answer(parsed.row, parsed.arrays, payload, frame.fds)
        except WireError as error:
            _close_all(frame.fds)
            self._drop(f"{pending.op.name}: {error}")
            raise
        if frame.status == Status.OK or (partial and frame.status == Status.E_PARTIAL):
            return answer
        _close_all(frame.fds)
        known = _results(pending.op, answer) if answer.arrays else answer.row
        raise error_for(pending.op.name, frame.status, message, pending.id, known)

    def _pump(self, until: float, done: Any) -> None:
        """Send and receive until `done()` or the time is over. AwayError, WireError: the connection is lost."""
        late = 0  # rounds behind that time: what has come by then is taken, however long more of it comes is not waited
        while not done():
            if self.closed:
                raise self._lost or AwayError(self._why)
            left = until - time.monotonic()
            wanted = select.POLLIN | (select.POLLOUT if self._out else 0)
            poller = select.poll()
            poller.register(self._sock, wanted)
            ready = poller.poll(None if left == math.inf else max(0, math.ceil(left * 1000)))
            try:
                for _, events in ready:
                    if events & select.POLLOUT:
                        self._send()
                    if events & ~select.POLLOUT:
                        self._receive()
            except OSError as error:
                self._lose(AwayError(self._gone(error)))
            except WireError as error:
                self._lose(error)
            except BaseException:  # KeyboardInterrupt, say: nobody knows what was sent or taken in
                self._lose(AwayError("interrupted in the middle of a frame"))
                raise
            late += left <= 0
            if left <= 0 and (not ready or late > _LATE_ROUNDS):
                return

    def _send(self) -> None:
        while self._out:
            data, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
            try:
                n = self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            _close_all(fds)
            self._out[0] = (data[n:], [])
            if n == len(data):
                self._out.popleft()

    def _receive(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(1 << 18, _SPACE, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        fds: list[int] = []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(payload) - len(payload) % 4
                fds += struct.unpack(f"{whole // 4}i", payload[:whole])
        if flags & socket.MSG_CTRUNC:
            _close_all(fds)
            raise WireError("descriptors were lost")
        if not data:
            _close_all(fds)
            raise ConnectionResetError(0, "end of file")
        frames = collections.deque(self._reader.feed(data, fds))
        try:
            while frames:
                self._take(frames.popleft())
        finally:  # of a stream that is broken
            for frame in frames:
                _close_all(frame.fds)

    def _take(self, frame: wire.Frame) -> None:
        if frame.op == Op.EVENT:
            _close_all(frame.fds)
            event, arrays = wire.EVENT_BODY.unpack(frame.body)
            self._events += (Event(*item, event.seq, event.lost) for item in arrays["item"])
            return
        pending = self._pending.get(frame.id)
        if pending is None or pending.op != frame.op:
            _close_all(frame.fds)
            raise WireError(f"a reply to request {frame.id}, {wire.op_name(frame.op)}, that was not sent")
        if frame.fds and pending.op not in (Op.HELLO, Op.REGION_CREATE, Op.REGION_ATTACH):
            _close_all(frame.fds)
            raise WireError(f"{pending.op.name}: a reply with {len(frame.fds)} descriptors")
        del self._pending[frame.id]
        pending._frame = frame
        if pending._forgotten:
            _close_all(frame.fds)

    def _gone(self, error: OSError) -> str:
        if self.counters is not None:
            return f"the daemon went away: {error.strerror}"
        return (
            f"{self._path}: closed before HELLO was answered ({error.strerror}): all places are taken"
            " (limits.max_clients), or the daemon is ending"
        )

    def _lose(self, error: Exception) -> None:
        self._lost = error
        self._drop(str(error))

    def _drop(self, why: str) -> None:
        """Close the socket and tell everyone who waits for a counter."""
        if self._why is not None:
            return
        self._why = why
        self._sock.close()
        _close_all(self._reader.take_fds())
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        for pending in self._pending.values():
            for index in pending._signals:
                if self.counters and 0 <= index < wire.COUNTERS:
                    self.counters._lose(index)
        self._pending.clear()


class _Answer(NamedTuple):
    row: Any
    arrays: dict[str, Any]
    raw: bytes
    fds: list[int]


def _pack(op: Op, arrays: dict[str, Sequence[Any]] | None = None, /, **values: Any) -> bytes:
    body = wire.REQUESTS[op]
    assert body is not None, f"{op.name} has a body of plain bytes"
    return body.pack(arrays, **values)


def _statuses(answer: _Answer) -> list[Status | int]:
    return [status_of(number) for number in answer.arrays["status"]]


def _results(op: Op, answer: _Answer) -> Any:
    if op == Op.LOAD:
        return [LoadResult(status_of(status), *r) for status, *r in answer.arrays["result"]]
    if op in (Op.WRITE, Op.DECODE, Op.EXTEND):
        return [CallResult(status_of(status), *r) for status, *r in answer.arrays["result"]]
    if op in (Op.STORE, Op.SLOT_DROP, Op.PIN, Op.UNPIN, Op.DROP):
        return _statuses(answer)
    return answer.row


def _same_length(keys: Sequence[bytes], buffers: Sequence[Any]) -> None:
    if len(keys) != len(buffers):
        raise KvstrideError(f"{len(keys)} keys and {len(buffers)} buffers")


def _dup_all(fds: Sequence[int]) -> list[int]:
    mine: list[int] = []
    try:
        for fd in fds:
            mine.append(os.dup(fd))
    except BaseException:
        _close_all(mine)
        raise
    return mine


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
