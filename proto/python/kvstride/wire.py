"""Frames and bodies of the protocol, as tables: bytes to values and back. Nothing here touches a socket.

A body is a `Body`: one `Table` and the arrays behind it. `REQUESTS` and `REPLIES` hold one for each operation; what
`Body.pack` makes, `Body.unpack` reads. All integers are little-endian; arrays start at multiples of 8 bytes from the
start of the body and are padded with zeros.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Callable, Iterable, NamedTuple, Sequence

from .errors import WireError

MAGIC = 0x3153564B
NONE = 0xFFFFFFFF
"""No slot, no namespace, no counter."""
DAEMON_COUNTER = 0x80000000
"""Added to an `after_counter`: an entry of the daemon's half."""
HEADER_BYTES = 32
MAX_FDS = 64
MAX_MESSAGE = 255
COUNTER_PAGE_BYTES = 8192
FEATURE_CUDA, FEATURE_DEVICES = 1, 2
"""Features of HELLO: regions are device memory of CUDA; the reply lists the devices."""
COUNTERS = 256
COUNTER_LIMIT = 1 << 62
"""Counter values stay below this."""
ZERO_KEY = bytes(32)


class Op(IntEnum):
    """Operations (section 13)."""

    HELLO = 1
    OPEN = 2
    REGION_CREATE = 3
    REGION_ATTACH = 4
    REGION_IMPORT = 5
    REGION_CLOSE = 6
    LOOKUP = 7
    RESERVE = 8
    RELEASE = 9
    LOAD = 10
    STORE = 11
    SLOT_TAKE = 12
    SLOT_DROP = 13
    WRITE = 14
    DECODE = 15
    EXTEND = 16
    PIN = 17
    UNPIN = 18
    DROP = 19
    RESET = 20
    CANCEL = 21
    STATUS = 22
    HEALTH = 23
    WATCH = 24
    PING = 25
    EVENT = 26
    RELOAD = 27
    DRAIN = 28


def op_name(op: int) -> str:
    """The name of `op`; "op N" for one that is not known here."""
    try:
        return Op(op).name
    except ValueError:
        return f"op {op}"


_CODES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i32": "i", "i64": "q", "f32": "f", "b16": "16s", "b32": "32s"}


class Table:
    """A fixed run of fields, given as "field:type field:type ..."."""

    def __init__(self, name: str, fields: str) -> None:
        pairs = [f.split(":") for f in fields.split()]
        self.name = name
        self.fields: list[tuple[str, str]] = [(n, t) for n, t in pairs]
        self.struct = struct.Struct("<" + "".join(_CODES[t] for _, t in pairs))
        self.size = self.struct.size
        self.row = namedtuple(name, [n for n, _ in pairs])  # type: ignore[misc]
        self._zero = {n: bytes(int(t[1:])) if t[0] == "b" else 0 for n, t in pairs}

    def pack(self, **values: Any) -> bytes:
        """Bytes of the table; fields that are not given are 0. WireError: no such field, or a value does not fit."""
        unknown = values.keys() - self._zero.keys()
        if unknown:
            raise WireError(f"{self.name} has no field {sorted(unknown)[0]}")
        for name, kind in self.fields:
            if kind[0] == "b" and len(values.get(name, self._zero[name])) != int(kind[1:]):
                raise WireError(f"{self.name}.{name}: {len(values[name])} bytes; it takes {kind[1:]}")
        try:
            return self.struct.pack(*{**self._zero, **values}.values())
        except (struct.error, OverflowError) as error:
            raise WireError(f"{self.name}: {error}") from None

    def unpack(self, data: bytes | memoryview, offset: int = 0) -> Any:
        """A named tuple of the fields. WireError: cut off, or a reserved field that is not 0."""
        if len(data) - offset < self.size:
            raise WireError(f"{self.name}: {len(data) - offset} bytes; it takes {self.size}")
        row = self.row._make(self.struct.unpack_from(data, offset))
        if getattr(row, "reserved", 0):
            raise WireError(f"{self.name}: reserved is {row.reserved}, not 0")
        return row


def _row(kind: str) -> Table:
    return Table("item", f"v:{kind}")


def pad8(data: bytes) -> bytes:
    """`data` with zeros up to a multiple of 8 bytes."""
    return data + bytes(-len(data) % 8)


@dataclass(frozen=True)
class Array:
    """`count(table row)` elements behind a table: of a `Table`, or of a bare type such as "u32"."""

    name: str
    kind: Table | str
    count: Callable[[Any], int]

    def pack(self, items: Sequence[Any]) -> bytes:
        if self.kind == "u8":
            return bytes(items)
        if self.kind == "b32":
            for at, item in enumerate(items):
                if not isinstance(item, (bytes, bytearray, memoryview)):
                    raise WireError(f"{self.name}[{at}]: {type(item).__name__}; a key is 32 bytes")
                if len(item) != 32:
                    raise WireError(f"{self.name}[{at}]: {len(item)} bytes; a key is 32")
            return b"".join(items)
        if isinstance(self.kind, str):
            try:
                return struct.pack(f"<{len(items)}{_CODES[self.kind]}", *items)
            except struct.error as error:
                raise WireError(f"{self.name}: {error}") from None
        for at, item in enumerate(items):
            if not isinstance(item, dict) and not hasattr(item, "_asdict"):
                raise WireError(f"{self.name}[{at}]: {type(item).__name__} is no row of {self.kind.name}")
        return b"".join(self.kind.pack(**(i if isinstance(i, dict) else i._asdict())) for i in items)

    def unpack(self, data: bytes, offset: int, n: int) -> tuple[Any, int]:
        table = _row(self.kind) if isinstance(self.kind, str) else self.kind
        end = offset + n * table.size
        if end > len(data):
            raise WireError(f"{self.name}: {len(data) - offset} bytes left; {n} items take {n * table.size}")
        if self.kind == "u8":
            return data[offset:end], end
        if isinstance(self.kind, str):
            return [v for (v,) in table.struct.iter_unpack(data[offset:end])], end
        return [table.unpack(data, offset + i * table.size) for i in range(n)], end


class Parsed(NamedTuple):
    """A body that was read: the row of its table (None without one) and its arrays by name."""

    row: Any
    arrays: dict[str, Any]


@dataclass(frozen=True)
class Body:
    """A table and its arrays, or nothing at all."""

    table: Table | None
    arrays: tuple[Array, ...] = ()

    def pack(self, arrays: dict[str, Sequence[Any]] | None = None, /, **values: Any) -> bytes:
        """Bytes of a body. WireError: a value does not fit, or an array's length is not what the table says."""
        if self.table is None:
            return b""
        arrays = arrays or {}
        out = self.table.pack(**values)
        row = self.table.unpack(out)
        for array in self.arrays:
            items = arrays.get(array.name, ())
            if len(items) != array.count(row):
                raise WireError(f"{array.name}: {len(items)} items where the table says {array.count(row)}")
            out = pad8(out + array.pack(items))
        return out

    def unpack(self, data: bytes) -> Parsed:
        """Values of a whole body. WireError: cut off, bytes left over, or padding that is not 0."""
        if self.table is None:
            if data:
                raise WireError(f"{len(data)} bytes where none belong")
            return Parsed(None, {})
        row, offset, arrays = self.table.unpack(data), self.table.size, {}
        for array in self.arrays:
            arrays[array.name], end = array.unpack(data, offset, array.count(row))
            offset = end + -end % 8
            if offset > len(data) or any(data[end:offset]):
                raise WireError(f"{array.name}: bad padding")
        if offset != len(data):
            raise WireError(f"{self.table.name}: {len(data) - offset} bytes left over")
        return Parsed(row, arrays)


@dataclass(frozen=True)
class _HelloRep(Body):
    """The reply to HELLO, with the list of devices where both sides have feature 2."""

    def unpack(self, data: bytes) -> Parsed:
        if not HELLO_REP.unpack(data).features & FEATURE_DEVICES:
            return super().unpack(data)
        row, _ = super().unpack(data[: HELLO_REP.size])
        _, arrays = HELLO_DEVICES_BODY.unpack(data[HELLO_REP.size :])
        return Parsed(row, arrays)


HEADER = Table("header", "magic:u32 op:u16 status:u16 id:u64 body_len:u32 n_fds:u16 reserved:u16 deadline_us:u64")
REPLY_HEAD = Table("reply_head", "msg_len:u32 reserved:u32")
HELLO_REQ = Table("hello_req", "version_min:u16 version_max:u16 pid:u32 features:u64 name_len:u32 reserved:u32")
HELLO_REP = Table(
    "hello_rep",
    "version:u16 is_admin:u16 n_counters:u32 features:u64 boot_id:b16 conn_id:u64 max_body:u32 max_keys:u32"
    " credit_requests:u32 control_requests:u32 credit_bytes:u64 default_deadline_us:u64 max_deadline_us:u64",
)
HELLO_DEVICES = Table("hello_devices", "n_devices:u32 reserved:u32")
DEVICE_ENTRY = Table("device_entry", "uuid:b16")

OPEN_REP = Table("open_rep", "ns:u32 reserved:u32 slot_bytes:u64 digest:b32")
REGION_CREATE_REQ = Table("region_create_req", "ns:u32 kind:u32 device:u32 n_slots:u32 bytes:u64")
REGION_REP = Table(
    "region_rep",
    "region:u32 n_slots:u32 slot_stride:u64 bytes:u64 piece_bytes:u64 n_pieces:u32 n_entries:u32 token:b16",
)
REGION_ATTACH_REQ = Table(
    "region_attach_req", "ns:u32 kind:u32 device:u32 n_slots:u32 bytes:u64 mode:u32 n_entries:u32 token:b16"
)
REGION_ENTRY = Table("region_entry", "slot:u32 gen:u32 flags:u32 depth:u32 key:b32")
REGION_IMPORT_REQ = Table("region_import_req", "ns:u32 device:u32 n_slots:u32 memory:u32 n_maps:u32 n_ipc:u32")
IPC_HANDLE = Table("ipc_handle", "uuid:b16 handle_low:b32 handle_high:b32")
PLANE_MAP = Table("plane_map", "fd:u32 backend:u32 base:u64 stride:u64")
REGION_CLOSE_REQ = Table("region_close_req", "region:u32 reserved:u32")
LOOKUP_REQ = Table("lookup_req", "ns:u32 n_keys:u32")
LOOKUP_REP = Table("lookup_rep", "n_hits:u32 n_keys:u32")
RESERVE_REQ = Table("reserve_req", "n_ns:u32 n_keys:u32 max_loads:u32 ttl_ms:u32")
RESERVE_REP = Table("reserve_rep", "lease:b16 n_leased:u32 ttl_ms:u32 bytes:u64")
RELEASE_REQ = Table("release_req", "lease:b16")
_JOB = "ns:u32 region:u32 n:u32 flags:u32 after_counter:u32 signal_counter:u32 after_value:u64 signal_value:u64"
LOAD_REQ = Table("load_req", _JOB + " lease:b16 lease_first:u32 reserved:u32")
SLOT_REF = Table("slot_ref", "slot:u32 gen:u32")
LOAD_REP = Table("load_rep", "n:u32 n_ok:u32")
LOAD_RESULT = Table("load_result", "status:u32 flags:u32 slot:u32 gen:u32")
STORE_REQ = Table("store_req", _JOB + " first_depth:u32 reserved:u32 parent:b32")
KEY_REP = Table("key_rep", "n:u32 n_ok:u32")
SLOT_TAKE_REQ = Table("slot_take_req", "region:u32 n:u32")
SLOT_TAKE_REP = Table("slot_take_rep", "n:u32 reserved:u32")
SLOT_DROP_REQ = Table("slot_drop_req", "region:u32 n:u32 after_counter:u32 reserved:u32 after_value:u64")
WRITE_REQ = Table(
    "write_req",
    "ns:u32 region:u32 n_tokens:u32 n_calls:u32 after_counter:u32 signal_counter:u32 after_value:u64 signal_value:u64",
)
WRITE_CALL = Table(
    "write_call",
    "plane:u32 scratch:u32 kv_c_offset:u64 kv_c_stride:u64 k_pe_offset:u64 k_pe_stride:u64 src_type:u32 kv_scale:f32",
)
CALL_REP = Table("call_rep", "n_calls:u32 n_ok:u32")
CALL_RESULT = Table("call_result", "status:u32 parts:u32 kernel:u32 bad:u32")
DECODE_REQ = Table(
    "decode_req", "ns:u32 region:u32 n_seqs:u32 table_width:u32 s_q:u32 h_q:u32 n_calls:u32 flags:u32"
)
DECODE_CALL = Table(
    "decode_call",
    "plane:u32 scratch:u32 parts:u32 sm_scale:f32 after_counter:u32 signal_counter:u32 after_value:u64"
    " signal_value:u64 q_nope_offset:u64 q_nope_token:u64 q_nope_head:u64 q_pe_offset:u64 q_pe_token:u64"
    " q_pe_head:u64 out_offset:u64 out_token:u64 out_head:u64 lse_offset:u64 lse_token:u64 lse_head:u64"
    " kv_scale:f32 reserved:u32",
)
EXTEND_REQ = Table(
    "extend_req", "ns:u32 region:u32 n_seqs:u32 table_width:u32 n_tokens:u32 h_q:u32 n_calls:u32 flags:u32"
)
KEYS_REQ = Table("keys_req", "ns:u32 n:u32")
RESET_REQ = Table("reset_req", "ns:u32 flags:u32")
RESET_REP = Table("reset_rep", "dropped:u64 aborted:u64 kept:u64 leases:u64")
CANCEL_REQ = Table("cancel_req", "target:u64")
CANCEL_REP = Table("cancel_rep", "outcome:u32 reserved:u32")
STATUS_REQ = Table("status_req", "section:u32 limit:u32 ns:u32 reserved:u32 cursor:u64")
STATUS_REP = Table("status_rep", "text_len:u32 reserved:u32")
HEALTH_REP = Table("health_rep", "state:u32 reasons:u32 uptime_us:u64 boot_id:b16")
WATCH_REQ = Table("watch_req", "mask:u32 reserved:u32")
RELOAD_REQ = Table("reload_req", "flags:u32 reserved:u32")
DRAIN_REQ = Table("drain_req", "on:u32 reserved:u32")
EVENT = Table("event", "seq:u64 lost:u64 n:u32 reserved:u32")
EVENT_ITEM = Table("event_item", "type:u32 ns:u32 depth:u32 cause:u32 key:b32")

TABLES: dict[str, Table] = {t.name: t for t in list(globals().values()) if isinstance(t, Table)}
"""All tables by the names that PROTOCOL.md gives them."""


def _n(field: str) -> Callable[[Any], int]:
    return lambda row: getattr(row, field)


_KEYS = Array("key", "b32", _n("n"))
_SLOTS = Array("slot", SLOT_REF, _n("n"))
_KEYS_BODY = Body(KEYS_REQ, (_KEYS,))
_KEY_REP_BODY = Body(KEY_REP, (Array("status", "u32", _n("n")),))
_REGION_REP_BODY = Body(REGION_REP, (Array("status", "u32", _n("n_entries")),))
_CALL_REP_BODY = Body(CALL_REP, (Array("result", CALL_RESULT, _n("n_calls")),))
_NOTHING = Body(None)

REQUESTS: dict[Op, Body | None] = {
    Op.HELLO: Body(HELLO_REQ, (Array("name", "u8", _n("name_len")),)),
    Op.OPEN: None,
    Op.REGION_CREATE: Body(REGION_CREATE_REQ),
    Op.REGION_ATTACH: Body(REGION_ATTACH_REQ, (Array("entry", REGION_ENTRY, _n("n_entries")),)),
    Op.REGION_IMPORT: Body(REGION_IMPORT_REQ, (Array("map", PLANE_MAP, _n("n_maps")),)),
    Op.REGION_CLOSE: Body(REGION_CLOSE_REQ),
    Op.LOOKUP: Body(LOOKUP_REQ, (Array("key", "b32", _n("n_keys")),)),
    Op.RESERVE: Body(RESERVE_REQ, (Array("ns", "u32", _n("n_ns")), Array("key", "b32", _n("n_keys")))),
    Op.RELEASE: Body(RELEASE_REQ),
    Op.LOAD: Body(LOAD_REQ, (Array("key", "b32", lambda r: 0 if r.flags & 1 else r.n), _SLOTS)),
    Op.STORE: Body(STORE_REQ, (_KEYS, _SLOTS)),
    Op.SLOT_TAKE: Body(SLOT_TAKE_REQ),
    Op.SLOT_DROP: Body(SLOT_DROP_REQ, (_SLOTS,)),
    Op.WRITE: Body(
        WRITE_REQ, (Array("call", WRITE_CALL, _n("n_calls")), Array("slot_mapping", "i64", _n("n_tokens")))
    ),
    Op.DECODE: Body(
        DECODE_REQ,
        (
            Array("call", DECODE_CALL, _n("n_calls")),
            Array("seq_len", "i32", _n("n_seqs")),
            Array("block_table", "i32", lambda r: r.n_seqs * r.table_width),
        ),
    ),
    Op.EXTEND: Body(
        EXTEND_REQ,
        (
            Array("call", DECODE_CALL, _n("n_calls")),
            Array("q_start", "i32", lambda r: r.n_seqs + 1),
            Array("seq_len", "i32", _n("n_seqs")),
            Array("block_table", "i32", lambda r: r.n_seqs * r.table_width),
        ),
    ),
    Op.PIN: _KEYS_BODY,
    Op.UNPIN: _KEYS_BODY,
    Op.DROP: _KEYS_BODY,
    Op.RESET: Body(RESET_REQ),
    Op.CANCEL: Body(CANCEL_REQ),
    Op.STATUS: Body(STATUS_REQ),
    Op.HEALTH: _NOTHING,
    Op.WATCH: Body(WATCH_REQ),
    Op.PING: None,
    Op.RELOAD: Body(RELOAD_REQ),
    Op.DRAIN: Body(DRAIN_REQ),
}
"""Bodies of requests; None: plain bytes (OPEN: a description, PING: anything)."""

REPLIES: dict[Op, Body | None] = {
    Op.HELLO: _HelloRep(HELLO_REP),
    Op.OPEN: Body(OPEN_REP),
    Op.REGION_CREATE: _REGION_REP_BODY,
    Op.REGION_ATTACH: _REGION_REP_BODY,
    Op.REGION_IMPORT: _REGION_REP_BODY,
    Op.REGION_CLOSE: _NOTHING,
    Op.LOOKUP: Body(LOOKUP_REP, (Array("state", "u8", _n("n_keys")),)),
    Op.RESERVE: Body(RESERVE_REP),
    Op.RELEASE: _NOTHING,
    Op.LOAD: Body(LOAD_REP, (Array("result", LOAD_RESULT, _n("n")),)),
    Op.STORE: _KEY_REP_BODY,
    Op.SLOT_TAKE: Body(SLOT_TAKE_REP, (_SLOTS,)),
    Op.SLOT_DROP: _KEY_REP_BODY,
    Op.WRITE: _CALL_REP_BODY,
    Op.DECODE: _CALL_REP_BODY,
    Op.EXTEND: _CALL_REP_BODY,
    Op.PIN: _KEY_REP_BODY,
    Op.UNPIN: _KEY_REP_BODY,
    Op.DROP: _KEY_REP_BODY,
    Op.RESET: Body(RESET_REP),
    Op.CANCEL: Body(CANCEL_REP),
    Op.STATUS: Body(STATUS_REP, (Array("text", "u8", _n("text_len")),)),
    Op.HEALTH: Body(HEALTH_REP),
    Op.WATCH: _NOTHING,
    Op.PING: None,
    Op.RELOAD: Body(STATUS_REP, (Array("text", "u8", _n("text_len")),)),
    Op.DRAIN: _NOTHING,
}
"""Payloads of replies, behind the message; None: plain bytes."""

HELLO_DEVICES_BODY = Body(HELLO_DEVICES, (Array("device", DEVICE_ENTRY, _n("n_devices")),))
EVENT_BODY = Body(EVENT, (Array("item", EVENT_ITEM, _n("n")),))


def pack_frame(
    op: int, request_id: int, body: bytes, *, n_fds: int = 0, deadline_us: int = 0, status: int = 0
) -> bytes:
    """A whole frame."""
    head = HEADER.pack(
        magic=MAGIC, op=op, status=status, id=request_id, body_len=len(body), n_fds=n_fds, deadline_us=deadline_us
    )
    return head + body


def unpack_header(data: bytes | memoryview) -> Any:
    """The header at the start of `data`. WireError: cut off, another magic, or more than 64 descriptors."""
    head = HEADER.unpack(data)
    if head.magic != MAGIC:
        raise WireError(f"magic is {head.magic:#010x}, not {MAGIC:#010x}")
    if head.n_fds > MAX_FDS:
        raise WireError(f"n_fds is {head.n_fds}, above {MAX_FDS}")
    return head


def pack_reply(message: str, payload: bytes) -> bytes:
    """A reply's body."""
    text = message.encode()
    return pad8(REPLY_HEAD.pack(msg_len=len(text)) + text) + payload


def unpack_reply(body: bytes) -> tuple[str, bytes]:
    """Message and payload of a reply's body; the payload is empty if there is none. WireError: malformed."""
    head = REPLY_HEAD.unpack(body)
    end = REPLY_HEAD.size + head.msg_len
    start = end + -end % 8
    if head.msg_len > MAX_MESSAGE or start > len(body) or any(body[end:start]):
        raise WireError("reply: bad message")
    return body[REPLY_HEAD.size : end].decode(errors="replace"), body[start:]


@dataclass
class Frame:
    """A frame that has come: its header's fields, its body and its descriptors (owned by who holds the frame)."""

    op: int
    status: int
    id: int
    body: bytes
    fds: list[int]


class FrameReader:
    """Cuts a byte stream with descriptors into frames.

    Descriptors are queued as they come, and each frame, in order, is given the first `n_fds` of the queue.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> list[Frame]:
        """Take what one receive brought; the frames that are whole now. WireError: the stream is broken."""
        self._data += data
        self._fds += fds
        frames: list[Frame] = []
        try:
            while len(self._data) >= HEADER_BYTES:
                head = unpack_header(bytes(self._data[:HEADER_BYTES]))
                if head.n_fds > len(self._fds):
                    raise WireError(f"{op_name(head.op)}: {head.n_fds} descriptors promised, {len(self._fds)} came")
                end = HEADER_BYTES + head.body_len
                if len(self._data) < end:
                    break
                fds_now, self._fds = self._fds[: head.n_fds], self._fds[head.n_fds :]
                frames.append(Frame(head.op, head.status, head.id, bytes(self._data[HEADER_BYTES:end]), fds_now))
                del self._data[:end]
            if self._fds and not self._data:
                raise WireError(f"{len(self._fds)} descriptors that belong to no frame")
        except WireError:
            for frame in frames:
                self._fds += frame.fds
            raise
        return frames

    def take_fds(self) -> list[int]:
        """Descriptors that wait for their frame, to be closed by the caller."""
        fds, self._fds = self._fds, []
        return fds
