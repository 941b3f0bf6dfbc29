"""Regions: memory that client and daemon share, mapped here with mmap, and copies between it and the caller's buffers."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any, NamedTuple, Sequence

from .errors import BufferRefused, KvstrideError, WireError
from .wire import NONE


class Slot(NamedTuple):
    """A slot of a region and its generation (0 in engine regions)."""

    slot: int
    gen: int = 0


ANY_SLOT = Slot(NONE, 0)
"""In LOAD: the daemon chooses."""


class PlaneMap(NamedTuple):
    """Where one plane (or the whole block) of slot 0 lies: `base` bytes into descriptor number `fd`; slot s lies
    `s * stride` bytes behind. Both are multiples of 16. `backend`: who attends to it, a `Backend`, perhaps
    `| BACKEND_OVERRIDE`; 0: code of your own that takes every stride as it is given."""

    fd: int
    base: int
    stride: int
    backend: int = 0


class _Segment(NamedTuple):
    piece: int
    offset: int
    length: int


def bytes_of(buffer: Any, need: int, *, writable: bool, itemsize: int = 1, what: str = "buffer") -> memoryview:
    """The first `need` bytes of a C-contiguous buffer (bytearray, array, memoryview, numpy array, ...), flat.

    `writable`: bytes will be written to it; `itemsize`: bytes of one element that the caller says it has.
    BufferRefused: no buffer, not contiguous, read-only though it is to be written, elements of another size, too short.
    """
    try:
        view = memoryview(buffer)
    except TypeError:
        raise BufferRefused(f"{what}: {type(buffer).__name__} has no buffer") from None
    if not view.c_contiguous:
        raise BufferRefused(f"{what}: not contiguous: shape {view.shape}, strides {view.strides}")
    if writable and view.readonly:
        raise BufferRefused(f"{what}: read-only")
    if view.itemsize != itemsize:
        raise BufferRefused(f"{what}: elements of {view.itemsize} bytes where {itemsize} are expected")
    if view.nbytes < need:
        raise BufferRefused(f"{what}: {view.nbytes} bytes; {need} are needed")
    return view.cast("B")[:need] if view.nbytes else memoryview(b"")


def make_memfd(name: str, nbytes: int) -> int:
    """A descriptor of `nbytes` zero bytes that REGION_IMPORT takes: allocated in full, sealed against shrinking and
    growing. The caller closes it. OSError: no memory."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Region:
    """A mapped region. `Client` makes them; `close` (or the client's end) unmaps.

    `number`: as the connection names it; `ns`: namespace, or `NONE` for scratch; `n_slots`: 0 for scratch;
    `slot_bytes`: bytes of a block, 0 for scratch; `nbytes`: of the whole region; `token`: 16 bytes, zeros if imported;
    `fds`: its descriptors in piece order, owned by the region.
    """

    def __init__(
        self, number: int, ns: int, n_slots: int, slot_bytes: int, nbytes: int, token: bytes, fds: Sequence[int],
        *, piece_bytes: int = 0, slot_stride: int = 0, maps: Sequence[PlaneMap] = (), pages: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Takes over `fds`, also when it fails. A daemon region has `piece_bytes` and `slot_stride`; an imported one
        `maps` and the bytes of each map's `pages`. WireError: a descriptor is smaller than its piece."""
        self.number, self.ns, self.n_slots, self.slot_bytes = number, ns, n_slots, slot_bytes
        self.nbytes, self.token, self.fds = nbytes, token, list(fds)
        self.piece_bytes, self.slot_stride = piece_bytes, slot_stride
        self.maps, self._pages = tuple(maps), tuple(pages)
        self._mmaps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        try:
            for i, fd in enumerate(self.fds):
                size = os.fstat(fd).st_size
                want = size if maps else min(piece_bytes, nbytes - i * piece_bytes)
                if want <= 0 or size < want:
                    raise WireError(f"region {number}: piece {i} has {size} bytes, not {want}")
                self._mmaps.append(mmap.mmap(fd, want, mmap.MAP_SHARED))
                self._views.append(memoryview(self._mmaps[-1]))
            if not maps and sum(len(v) for v in self._views) != nbytes:
                raise WireError(f"region {number}: {len(self.fds)} pieces of {piece_bytes} do not make {nbytes} bytes")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def imported(self) -> bool:
        """The engine's own memory."""
        return bool(self.maps)

    def close(self) -> None:
        """Unmap and close the descriptors; the daemon's side is `Client.region_close`. A second call does nothing.

        KvstrideError: the caller still holds a `view`; release it and call again.
        """
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)
        for view in self._views:
            view.release()
        self._views = []
        while self._mmaps:
            try:
                self._mmaps[-1].close()
            except BufferError:
                raise KvstrideError(f"region {self.number}: a view of it is still in use") from None
            self._mmaps.pop()

    def view(self, offset: int, length: int) -> memoryview:
        """`length` bytes at `offset` of a daemon region, writable, without a copy; release it before `close`.

        IndexError: outside the region. KvstrideError: imported, closed, or not in one piece (use `read` and `write`).
        """
        if self.imported:
            raise KvstrideError(f"region {self.number}: imported memory has views of its own")
        segments = self._span(offset, length)
        if len(segments) != 1:
            raise KvstrideError(f"region {self.number}: {offset}+{length} lies in {len(segments)} pieces")
        return self._at(segments[0])

    def read(self, offset: int, length: int) -> bytes:
        """A copy of `length` bytes at `offset` of a daemon region. IndexError: outside it."""
        return b"".join(self._at(s) for s in self._span(offset, length))

    def write(self, offset: int, data: Any) -> None:
        """Copy a contiguous buffer, whole, to `offset` of a daemon region. IndexError, BufferRefused."""
        view = memoryview(data)
        source = bytes_of(view, view.nbytes, writable=False, itemsize=view.itemsize)
        self._scatter(self._span(offset, len(source)), source)

    def read_slot(self, slot: int, buffer: Any, *, itemsize: int = 1) -> None:
        """Copy the block in `slot` into the first `slot_bytes` bytes of a writable contiguous buffer whose elements
        have `itemsize` bytes. BufferRefused, IndexError: nothing has moved."""
        segments = self._block(slot)
        target, at = bytes_of(buffer, self.slot_bytes, writable=True, itemsize=itemsize), 0
        for segment in segments:
            target[at : at + segment.length] = self._at(segment)
            at += segment.length

    def write_slot(self, slot: int, buffer: Any, *, itemsize: int = 1) -> None:
        """Copy the first `slot_bytes` bytes of a contiguous buffer into `slot`; the buffer may be read-only.
        BufferRefused, IndexError: nothing has moved."""
        segments = self._block(slot)
        self._scatter(segments, bytes_of(buffer, self.slot_bytes, writable=False, itemsize=itemsize))

    def _scatter(self, segments: Sequence[_Segment], source: memoryview) -> None:
        at = 0
        for segment in segments:
            self._at(segment)[:] = source[at : at + segment.length]
            at += segment.length

    def _at(self, segment: _Segment) -> memoryview:
        if not self._views:
            raise KvstrideError(f"region {self.number} is closed")
        return self._views[segment.piece][segment.offset : segment.offset + segment.length]

    def _block(self, slot: int) -> list[_Segment]:
        if not 0 <= slot < self.n_slots:
            raise IndexError(f"region {self.number}: slot {slot} of {self.n_slots}")
        if self.maps:
            return [_Segment(m.fd, m.base + slot * m.stride, n) for m, n in zip(self.maps, self._pages)]
        return self._span(slot * self.slot_stride, self.slot_bytes)

    def _span(self, offset: int, length: int) -> list[_Segment]:
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise IndexError(f"region {self.number}: {offset}+{length} of {self.nbytes} bytes")
        segments = []
        while length > 0:
            piece, at = divmod(offset, self.piece_bytes)
            n = min(length, self.piece_bytes - at)
            segments.append(_Segment(piece, at, n))
            offset, length = offset + n, length - n
        return segments
