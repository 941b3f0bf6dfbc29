"""Copies between mapped memory and buffers, without a daemon."""

from __future__ import annotations

import array
import ctypes
import os
import unittest

from kvstride.errors import BufferRefused, KvstrideError, WireError
from kvstride.region import PlaneMap, Region, bytes_of, make_memfd


def region_of(pieces: list[int], piece_bytes: int, slots: int, slot_bytes: int) -> Region:
    fds = [make_memfd("test", n) for n in pieces]
    return Region(
        1, 1, slots, slot_bytes, sum(pieces), bytes(16), fds, piece_bytes=piece_bytes, slot_stride=slot_bytes
    )


class Buffers(unittest.TestCase):
    def test_taken(self) -> None:
        for buffer, itemsize in (
            (bytearray(64), 1), (memoryview(bytearray(80)), 1), (array.array("H", [0] * 32), 2),
            ((ctypes.c_float * 16)(), 4), (memoryview(bytearray(64)).cast("B", (8, 8)), 1),
        ):  # fmt: skip
            self.assertEqual(bytes_of(buffer, 64, writable=True, itemsize=itemsize).nbytes, 64)

    def test_refused(self) -> None:
        for buffer, text in (
            (memoryview(bytearray(128))[::2], "not contiguous"), (bytes(64), "read-only"),
            (memoryview(bytearray(64)).toreadonly(), "read-only"), (bytearray(63), "63 bytes; 64 are needed"),
            (array.array("H", [0] * 32), "elements of 2 bytes where 1"), ([0] * 64, "list has no buffer"),
            (bytearray(), "0 bytes"),
        ):  # fmt: skip
            with self.subTest(text), self.assertRaisesRegex(BufferRefused, text):
                bytes_of(buffer, 64, writable=True)

    def test_nothing_moves(self) -> None:
        with region_of([4096], 4096, 4, 1024) as region:
            region.write_slot(1, b"\7" * 1024)
            short = bytearray(b"\1" * 1023)
            for bad in (short, memoryview(bytearray(b"\1" * 2048))[::2], array.array("I", [1] * 256)):
                with self.assertRaises(BufferRefused):
                    region.read_slot(1, bad)
                with self.assertRaises(BufferRefused):
                    region.write_slot(1, bad)
            self.assertEqual(short, b"\1" * 1023)
            self.assertEqual(region.read(1024, 1024), b"\7" * 1024)
            region.write_slot(2, bytes(range(256)) * 4)
            wide = array.array("I", [0] * 256)
            region.read_slot(2, wide, itemsize=4)
            self.assertEqual(wide.tobytes(), bytes(range(256)) * 4)


class Mapping(unittest.TestCase):
    def test_pieces(self) -> None:
        with region_of([4096, 4096, 1024], 4096, 3, 3072) as region:
            block = os.urandom(3072)
            region.write_slot(1, block)  # From 3072 to 6144: over the seam.
            out = bytearray(4000)
            region.read_slot(1, out)
            self.assertEqual(out, block + bytes(928))
            self.assertEqual(region.read(3072, 3072), block)
            with self.assertRaises(KvstrideError):
                region.view(3072, 3072)
            with self.assertRaises(IndexError):
                region.read_slot(3, out)
            with self.assertRaises(IndexError):
                region.write(9215, b"ab")

    def test_plane_maps(self) -> None:
        fd = make_memfd("test", 8192)
        maps = [PlaneMap(0, 0, 1024), PlaneMap(0, 4096, 2048)]
        with Region(1, 1, 2, 1536, 8192, bytes(16), [fd], maps=maps, pages=[512, 1024]) as region:
            region.write_slot(1, b"a" * 512 + b"b" * 1024)
            self.assertEqual(os.pread(fd, 512, 1024) + os.pread(fd, 1024, 6144), b"a" * 512 + b"b" * 1024)
            with self.assertRaises(KvstrideError):
                region.view(0, 16)

    def test_too_small(self) -> None:
        with self.assertRaises(WireError):
            Region(1, 1, 1, 8192, 8192, bytes(16), [make_memfd("test", 4096)], piece_bytes=8192, slot_stride=8192)

    def test_close_with_a_view(self) -> None:
        region = region_of([4096], 4096, 4, 1024)
        view = region.view(0, 16)
        with self.assertRaises(KvstrideError):
            region.close()
        view.release()
        region.close()
        with self.assertRaises(KvstrideError):
            region.read(0, 16)


if __name__ == "__main__":
    unittest.main()
