"""The client against the real daemon."""

from __future__ import annotations

import inspect
import math
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import unittest
import unittest.mock
from typing import Sequence

from kvstride import (
    ANY_SLOT, BACKEND_OVERRIDE, LOAD_NO_COPY, LOAD_SHARED, NONE, READY, AwayError, Backend, BufferRefused,
    CancelledError, Client, DeadlineError, DecodeCall, Entry, Event, Format, Opened, PartialError, PlaneMap, Region,
    Slot, Status, StatusError, Sync, WriteCall, derive_chain, derive_key, make_memfd, mla_namespace, wire,
)  # fmt: skip
from kvstride.errors import KvstrideError, WireError, status_name, status_of
from kvstride.wire import Op

from support import PROTOCOL, ROOT, Daemon

KEYS = derive_chain(list(range(1, 41)), 4)
PAGE = 4 * 1152

SECOND_CLIENT = """
import sys
from kvstride import Client, derive_chain, mla_namespace
keys = derive_chain(list(range(1, 41)), 4)[:3]
with Client(sys.argv[1], name="second") as client:
    opened = client.open(mla_namespace("processes", 2, 4))
    region = client.region_create(opened, 4)
    blocks = [bytearray(opened.slot_bytes) for _ in keys]
    client.load_buffers(opened, region, keys, blocks)
    print(client.lookup(opened, keys).n_hits, *(sum(b) for b in blocks))
"""


class Pages(unittest.TestCase):
    """What README.md and PROTOCOL.md show is what happens."""

    def test_hello_of_the_worked_session(self) -> None:
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        dumps = dict(re.findall(r"```hex (hello_re[qp])\n(.*?)```", PROTOCOL.read_text(), re.DOTALL))
        request, wanted = (
            bytearray.fromhex("".join(line[4:] for line in dumps[name].splitlines())) for name in ("hello_req", "hello_rep")
        )
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(10)
            stream.connect(daemon.socket)
            stream.sendall(request)
            got = bytearray(stream.recv(len(wanted), socket.MSG_WAITALL))
        for frame in (got, wanted):
            frame[56:80] = bytes(24)  # boot id and number of the connection
        self.assertEqual(got.hex(" ", 8), wanted.hex(" ", 8))

    def test_programs(self) -> None:
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        text = (ROOT / "proto" / "python" / "README.md").read_text()
        programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        said = []
        for program in programs:
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "proto" / "python"), "KVSTRIDE_SOCKET": daemon.socket}
            run = subprocess.run(
                [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
            )
            self.assertEqual(run.returncode, 0, run.stderr)
            said.append(run.stdout.splitlines())
        self.assertEqual(said[0], ["2", "[<Status.E_EXISTS: 15>]"])
        self.assertAlmostEqual(float(said[1][-1]), math.log(4), places=6)

    def test_signatures(self) -> None:
        text = (ROOT / "proto" / "python" / "README.md").read_text()
        for name in ("read", "write", "view", "read_slot", "write_slot"):
            given = list(inspect.signature(getattr(Region, name)).parameters.values())[1:]  # without self
            bare = inspect.Signature([p.replace(annotation=p.empty) for p in given])
            self.assertIn(f"| `{name}{bare}` |", text)
        defaults = {**Entry._field_defaults, "key": "ZERO_KEY"}
        fields = ", ".join(f"{f}={defaults[f]}" if f in defaults else f for f in Entry._fields)
        self.assertIn(f"`Entry({fields})`", text)


class WithDaemon(unittest.TestCase):
    """One daemon a class; a client and a namespace a test."""

    daemon: Daemon
    settings: tuple[str, ...] = ()

    @classmethod
    def setUpClass(cls) -> None:
        cls.daemon = Daemon(*cls.settings)

    @classmethod
    def tearDownClass(cls) -> None:
        status = cls.daemon.stop()
        assert status == 0, f"kvstrided ended with {status}"

    def setUp(self) -> None:
        self.client = Client(self.daemon.socket, name=self._testMethodName[:64])
        self.addCleanup(self.client.close)
        self.opened = self.client.open(mla_namespace(self._testMethodName, 2, 4))

    def other(self, path: str | None = None) -> Client:
        client = Client(path or self.daemon.socket)
        self.addCleanup(client.close)
        return client

    def stored(self, region: Region, n: int, **options: object) -> list[bytes]:
        """`n` random blocks under the first keys."""
        blocks = [random.randbytes(self.opened.slot_bytes) for _ in range(n)]
        self.client.store_buffers(self.opened, region, KEYS[:n], blocks, **options)  # type: ignore[arg-type]
        return blocks

    def refused(self, status: Status) -> object:
        return _Refused(self, status)


class _Refused:
    def __init__(self, test: unittest.TestCase, status: Status) -> None:
        self.test, self.status = test, status

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self.test.assertIsInstance(error, StatusError, f"{self.status.name} was expected")
        assert isinstance(error, StatusError)
        self.test.assertEqual(Status(error.status).name, self.status.name, str(error))
        return True


class Sessions(WithDaemon):
    def test_hello(self) -> None:
        hello = self.client.hello
        self.assertEqual((hello.version, hello.is_admin, hello.n_counters, hello.features), (1, 0, 256, 0))
        self.assertGreaterEqual(hello.max_body, 4096)
        health = self.client.health()
        self.assertEqual((health.state, health.boot_id), (0, hello.boot_id))
        self.assertEqual(self.client.ping(b"hello"), b"hello")
        self.assertEqual(self.client.ping(), b"")
        self.assertEqual(self.other(self.daemon.admin).hello.is_admin, 1)

    def test_hello_lists_the_devices_to_who_understands_them(self) -> None:
        for features in (wire.FEATURE_DEVICES, wire.FEATURE_CUDA | wire.FEATURE_DEVICES, 2**64 - 1):
            with Client(self.daemon.socket, features=features) as client:
                self.assertEqual(client.hello.features & wire.FEATURE_DEVICES, wire.FEATURE_DEVICES)
                self.assertEqual(client.hello.devices, (bytes(16),), "one, and it is the cpu device")
                self.assertEqual(client.ping(b"still in step"), b"still in step")
        self.assertEqual(self.client.hello.devices, ())

    def test_close_unmaps_the_rest_while_a_view_of_one_region_is_held(self) -> None:
        client = Client(self.daemon.socket)
        regions = [client.scratch_create(4096) for _ in range(3)]
        view = regions[0].view(0, 16)
        self.assertRaises(KvstrideError, client.close)
        self.assertIsNone(client.counters)
        for region in regions[1:]:
            self.assertRaisesRegex(KvstrideError, "closed", region.view, 0, 16)
        view.release()
        client.close()

    def test_the_worked_session(self) -> None:
        client = self.client
        opened = client.open(mla_namespace("tiny", 2, 4, weights="rev1"))
        self.assertEqual(opened.slot_bytes, 9216)
        region = client.region_create(opened, 4)
        self.assertEqual((region.n_slots, region.slot_stride, region.nbytes), (4, 9216, 36864))
        slots = client.slot_take(region, 2)
        blocks = [os.urandom(9216), os.urandom(9216)]
        stored = client.submit_store(opened, region, KEYS[:2], slots, sync=Sync(0, 1, 0, 1))
        self.assertEqual(client.lookup(opened, KEYS[:3]).n_hits, 0)
        self.assertFalse(stored.done)
        for slot, block in zip(slots, blocks):
            region.write_slot(slot.slot, block)
        client.counters.advance(0, 1)
        self.assertEqual(client.wait_signal(0, 1, 5), 0)
        self.assertEqual(stored.wait(), [Status.OK, Status.OK])
        found = client.lookup(opened, KEYS[:3])
        self.assertEqual((found.n_hits, found.states), (2, [READY, READY, 0]))
        loads = client.submit_load(opened, region, KEYS[:2], sync=Sync(signal_counter=1, signal_value=1))
        self.assertEqual(client.wait_signal(1, 1, 5), 0)
        results = loads.wait()
        self.assertEqual([(r.status, r.flags) for r in results], [(0, LOAD_SHARED)] * 2)
        for result, block in zip(results, blocks):
            self.assertEqual(region.read(result.slot * 9216, 9216), block)
        again = client.load(opened, region, KEYS[:2])
        self.assertEqual([(r.flags, r.ref) for r in again], [(LOAD_SHARED | LOAD_NO_COPY, r.ref) for r in results])
        for _ in range(2):
            self.assertEqual(client.slot_drop(region, [r.ref for r in results]), [0, 0])
        with self.refused(Status.E_PARTIAL):
            client.slot_drop(region, [r.ref for r in results])
        client.region_close(region)

    def test_a_second_process(self) -> None:
        opened = self.client.open(mla_namespace("processes", 2, 4))
        region = self.client.region_create(opened, 4)
        blocks = [random.randbytes(opened.slot_bytes) for _ in range(3)]
        self.client.store_buffers(opened, region, KEYS[:3], blocks)
        self.client.close()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "proto" / "python")}
        second = subprocess.run(
            [sys.executable, "-B", "-c", SECOND_CLIENT, self.daemon.socket], env=environment, capture_output=True,
            text=True, timeout=10,
        )  # fmt: skip
        self.assertEqual(second.stdout.split(), ["3", *(str(sum(b)) for b in blocks)], second.stderr)

    def test_away(self) -> None:
        with self.assertRaises(AwayError):
            Client(self.daemon.socket + "-not")
        with self.assertRaisesRegex(AwayError, "200 bytes, 107 at most"):
            Client("/" + "x" * 199)
        with unittest.mock.patch.dict(os.environ, {"KVSTRIDE_SOCKET": self.daemon.socket + "-other"}):
            with self.assertRaisesRegex(AwayError, "-other: No such file"):
                Client()
        with unittest.mock.patch.dict(os.environ, {"KVSTRIDE_SOCKET": ""}):
            with self.assertRaisesRegex(AwayError, "^/nowhere/default: "):
                with unittest.mock.patch("kvstride.client.DEFAULT_SOCKET", "/nowhere/default"):
                    Client()
        Client(pathlib.Path(self.daemon.socket)).close()
        self.client.close()
        self.client.close()
        with self.assertRaises(AwayError):
            self.client.ping()


    def test_no_place(self) -> None:
        daemon = Daemon("limits.max_clients=1")
        self.addCleanup(daemon.stop)
        with Client(daemon.socket):
            with self.assertRaisesRegex(AwayError, "closed before HELLO was answered .*: all places are taken"):
                Client(daemon.socket)


class Statuses(WithDaemon):
    def test_are_members(self) -> None:
        client, opened = self.client, self.opened
        region = client.region_create(opened, 3)
        self.stored(region, 1)
        again = client.store_buffers(opened, region, KEYS[:2], [bytes(opened.slot_bytes)] * 2)
        self.assertEqual(repr(again), "[<Status.E_EXISTS: 15>, <Status.OK: 0>]")
        self.assertEqual(again, [15, 0])
        results = client.load(opened, region, [*KEYS[:2], KEYS[5]], partial=True)
        self.assertEqual([r.status for r in results], [Status.OK, Status.OK, Status.E_NOT_FOUND])
        dropped = client.slot_drop(region, [r.ref for r in results[:2]])
        pinned = client.pin(opened, [KEYS[0], KEYS[5]], partial=True)
        for status in (*(r.status for r in results), *dropped, *pinned):
            self.assertIsInstance(status, Status)
        with self.assertRaises(StatusError) as caught:
            client.region_close(Region(99, 0, 0, 0, 0, bytes(16), []))
        self.assertIs(caught.exception.status, Status.E_NOT_FOUND)

    def test_one_that_is_not_known_stays_a_number(self) -> None:
        self.assertIs(status_of(15), Status.E_EXISTS)
        self.assertEqual((status_of(99), type(status_of(99)), status_name(99)), (99, int, "status 99"))

    def test_a_key_keeps_its_first_bytes(self) -> None:
        client, opened = self.client, self.opened
        region = client.region_create(opened, 2)
        first, out = random.randbytes(opened.slot_bytes), bytearray(opened.slot_bytes)
        self.assertEqual(client.store_buffers(opened, region, KEYS[:1], [first]), [Status.OK])
        self.assertEqual(client.store_buffers(opened, region, KEYS[:1], [bytes(len(first))]), [Status.E_EXISTS])
        client.load_buffers(opened, region, KEYS[:1], [out])
        self.assertEqual(out, first)


class Copies(WithDaemon):
    def test_buffers(self) -> None:
        region = self.client.region_create(self.opened, 4)
        blocks = self.stored(region, 3)
        out = [bytearray(self.opened.slot_bytes + 5) for _ in range(3)]
        self.client.load_buffers(self.opened, region, KEYS[:3], out)
        self.assertEqual([bytes(o[:-5]) for o in out], blocks)
        read_only = memoryview(bytes(self.opened.slot_bytes))
        strided = memoryview(bytearray(2 * self.opened.slot_bytes))[::2]
        sent = self.client._next_id
        for bad in (read_only, strided, bytearray(10), memoryview(bytearray(self.opened.slot_bytes)).cast("I")):
            good = bytearray(self.opened.slot_bytes)
            with self.assertRaisesRegex(BufferRefused, r"buffers\[1\]"):
                self.client.load_buffers(self.opened, region, KEYS[:2], [good, bad])
            self.assertFalse(any(good))
        self.assertEqual(self.client._next_id, sent)
        with self.assertRaises(PartialError) as caught:
            self.client.load_buffers(self.opened, region, KEYS[:4], [*out, bytearray(self.opened.slot_bytes)])
        self.assertEqual([r.status for r in caught.exception.results], [0, 0, 0, Status.E_NOT_FOUND])
        self.assertEqual(str(caught.exception), "LOAD: E_PARTIAL: 1 of 4 failed, the first is [3]: E_NOT_FOUND")
        self.assertEqual(len(self.client.slot_take(region, 4)), 4)  # Nothing is held any more.

    def test_private_slots_and_keep(self) -> None:
        client, opened = self.client, self.opened
        region = client.region_create(opened, 3)
        blocks = self.stored(region, 2)
        mine = client.slot_take(region, 1)
        self.assertEqual([(r.flags, r.ref) for r in client.load(opened, region, KEYS[1:2], mine)], [(0, mine[0])])
        out = bytearray(opened.slot_bytes)
        region.read_slot(mine[0].slot, out)
        self.assertEqual(out, blocks[1])
        self.assertEqual(client.store(opened, region, KEYS[1:2], mine, keep=True, first_depth=1, parent=KEYS[0]), [15])
        with self.refused(Status.E_PARTIAL):
            client.load(opened, region, KEYS[:1], mine)  # It is shared now.
        with self.refused(Status.E_INVALID):
            client.load(opened, region, KEYS[:2], [*mine, *mine])
        with self.refused(Status.E_RANGE):
            client.load(opened, region, KEYS[:1], [Slot(3, 1)])
        stale = client.load(opened, region, KEYS[:1], [Slot(mine[0].slot, mine[0].gen + 1)], partial=True)
        self.assertEqual(stale[0].status, Status.E_STALE)
        with self.refused(Status.E_NO_SPACE):
            client.slot_take(region, 3)

    def test_attach(self) -> None:
        region = self.client.region_create(self.opened, 4)
        blocks = self.stored(region, 1)
        other = self.other()
        opened = other.open(self.opened.namespace)
        self.assertEqual(opened.ns, self.opened.ns)
        seat = other.region_attach(opened, region.token)
        held = other.load(opened, seat, KEYS[:1])
        self.assertEqual(region.read(held[0].slot * region.slot_stride, region.slot_bytes), blocks[0])
        foreign = self.client.slot_drop(region, [held[0].ref], partial=True)
        self.assertEqual(foreign, [Status.E_STATE])
        with self.refused(Status.E_EXISTS):
            other.region_attach(opened, region.token)
        with self.refused(Status.E_NOT_FOUND):
            other.region_attach(opened, bytes(16))

    def test_import_one_tensor_a_layer(self) -> None:
        client, opened = self.client, self.opened
        fds = [make_memfd(f"layer {i}", 6 * PAGE) for i in range(2)]
        self.addCleanup(lambda: [os.close(fd) for fd in fds])
        maps = [PlaneMap(0, PAGE, PAGE), PlaneMap(1, 0, PAGE + 1152)]
        with client.region_import(opened, 4, fds, maps) as region:
            block = random.randbytes(opened.slot_bytes)
            region.write_slot(2, block)
            self.assertEqual(os.pread(fds[0], PAGE, 3 * PAGE), block[:PAGE])
            self.assertEqual(os.pread(fds[1], PAGE, 2 * (PAGE + 1152)), block[PAGE:])
            self.assertEqual(client.store(opened, region, KEYS[:1], [Slot(2)]), [0])
            self.assertEqual(client.load(opened, region, KEYS[:1], [Slot(3)])[0].status, 0)
            out = bytearray(opened.slot_bytes)
            region.read_slot(3, out)
            self.assertEqual(out, block)
            with self.refused(Status.E_INVALID):
                client.load(opened, region, KEYS[:1], [ANY_SLOT])
        whole = client.region_import(opened, 2, [fds[0]])
        client.load(opened, whole, KEYS[:1], [Slot(0)])
        self.assertEqual(os.pread(fds[0], len(block), 0), block)
        client.region_close(whole)

    def test_imports_that_are_refused(self) -> None:
        client, opened = self.client, self.opened
        good, loose = make_memfd("good", 2 * PAGE), os.memfd_create("loose")
        read_only = os.open(f"/proc/self/fd/{good}", os.O_RDONLY)
        self.addCleanup(lambda: [os.close(fd) for fd in (good, loose, read_only)])
        os.ftruncate(loose, 2 * PAGE)
        for n, fds, maps, status in (
            (1, [loose], None, Status.E_INVALID), (2, [good], None, Status.E_RANGE), (1, [], None, Status.E_INVALID),
            (1, [good], [PlaneMap(1, 0, 2 * PAGE)], Status.E_RANGE),
            (1, [good, good], None, Status.E_INVALID), (1, [read_only], None, Status.E_INVALID),
            (1, [good], [PlaneMap(0, 8, 2 * PAGE)], Status.E_INVALID),
            (1, [good], [PlaneMap(0, 0, PAGE)] * 3, Status.E_INVALID),
            (2, [good], [PlaneMap(0, 0, 16)], Status.E_INVALID),
            (1, [good], [PlaneMap(0, 0, 2 * PAGE, 8)], Status.E_INVALID),
        ):  # fmt: skip
            with self.subTest(maps=maps, n=n), self.refused(status):
                client.region_import(opened, n, fds, maps)


    def test_only_a_verified_backend_has_whole_blocks(self) -> None:
        client, opened = self.client, self.opened
        fd = make_memfd("blocks", 4 * PAGE)
        self.addCleanup(os.close, fd)
        for backend in (0, Backend.FLASHMLA, Backend.OTHER | BACKEND_OVERRIDE):
            client.region_close(client.region_import(opened, 2, [fd], [PlaneMap(0, 0, 2 * PAGE, backend)]))
        with self.refused(Status.E_UNSUPPORTED):
            client.region_import(opened, 2, [fd], [PlaneMap(0, 0, 2 * PAGE, Backend.OTHER)])
        layers = [PlaneMap(0, 0, PAGE, Backend.OTHER), PlaneMap(0, 2 * PAGE, PAGE, Backend.OTHER)]
        client.region_close(client.region_import(opened, 2, [fd], layers))


class Keys(WithDaemon):
    def setUp(self) -> None:
        super().setUp()
        self.region = self.client.region_create(self.opened, 4)
        self.blocks = self.stored(self.region, 3)

    def test_leases(self) -> None:
        client, opened = self.client, self.opened
        lease = client.reserve([opened], KEYS[:4], max_loads=1, ttl_ms=5000)
        self.assertEqual((lease.n_leased, lease.bytes), (3, 3 * opened.slot_bytes))
        self.assertTrue(0 < lease.ttl_ms <= 5000)
        self.assertEqual(client.drop(opened, KEYS[:1], partial=True), [Status.E_BUSY])
        held = client.load(opened, self.region, [], lease=lease, lease_first=1, n=2)
        self.assertEqual(self.region.read(held[1].slot * opened.slot_bytes, opened.slot_bytes), self.blocks[2])
        with self.refused(Status.E_STATE):
            client.load(opened, self.region, [], lease=lease, n=1)
        client.release(lease)
        with self.refused(Status.E_NOT_FOUND):
            client.release(lease)
        self.assertEqual(client.reserve([opened], KEYS[3:4]).n_leased, 0)
        client.reserve([opened], KEYS[:1], ttl_ms=20)
        until = time.monotonic() + 5
        while client.drop(opened, KEYS[:1], partial=True) != [0]:
            self.assertLess(time.monotonic(), until)
            time.sleep(0.01)

    def test_a_lease_goes_with_its_connection(self) -> None:
        other = self.other()
        lease = other.reserve([other.open(self.opened.namespace)], KEYS[:3], max_loads=5)
        self.client.load(self.opened, self.region, [], lease=lease, n=1)
        other.close()
        until = time.monotonic() + 5
        while self.client.drop(self.opened, KEYS[:1], partial=True) != [0]:
            self.assertLess(time.monotonic(), until)
            time.sleep(0.01)

    def test_pin_drop_reset(self) -> None:
        client, opened = self.client, self.opened
        self.assertEqual(client.pin(opened, KEYS[:1]), [0])
        self.assertEqual(client.pin(opened, KEYS[3:4], partial=True), [Status.E_NOT_FOUND])
        with self.assertRaises(PartialError) as caught:
            client.drop(opened, [KEYS[0], KEYS[1], KEYS[3]])
        self.assertEqual(caught.exception.results, [Status.E_BUSY, 0, Status.E_NOT_FOUND])
        self.assertEqual(client.reset(opened)[:3], (1, 0, 1))
        self.assertEqual(client.lookup(opened, KEYS[:3]).states, [READY, 0, 0])
        self.assertEqual(client.unpin(opened, KEYS[:1]), [0])
        self.assertEqual(client.reset(opened, pinned=True)[:3], (1, 0, 0))
        self.assertEqual(client.lookup(opened, KEYS[:3]).n_hits, 0)

    def test_watch(self) -> None:
        other = self.other()
        other.watch()
        self.stored(self.region, 4)
        self.client.drop(self.opened, KEYS[3:4])
        self.client.reset(self.opened)
        events: list[Event] = []
        for event in other.events(5):
            events += [event] if event.ns == self.opened.ns else []
            if event.type == 2:
                break
        self.assertEqual([(e.type, e.cause, e.key) for e in events], [(0, 0, KEYS[3]), (1, 2, KEYS[3]), (2, 0, bytes(32))])
        self.assertEqual([(e.depth, e.lost) for e in events[:2]], [(3, 0)] * 2)
        self.assertEqual(events[0].seq, 1)
        self.client.store_buffers(self.opened, self.region, KEYS[:2], self.blocks[:2])
        self.client.pin(self.opened, KEYS[:1])
        self.client.reset()  # One event a namespace; where a pinned block stays, one for each that goes.
        more = [(e.type, e.cause, e.key) for e in other.events(0.1) if e.ns == self.opened.ns]
        self.assertEqual(more, [(0, 0, KEYS[0]), (0, 0, KEYS[1]), (1, 2, KEYS[1])])
        other.watch(0)
        self.stored(self.region, 1)
        self.assertEqual(list(other.events(0.05)), [])

    def test_status(self) -> None:
        summary = self.client.status()
        self.assertEqual((summary["health"], summary["health_reasons"]), ("ok", 0))
        with self.refused(Status.E_DENIED):
            self.client.status("clients")
        admin = self.other(self.daemon.admin)
        for section in ("clients", "leases", "keys", "namespaces", "fsck", "tenants"):
            self.assertIsInstance(admin.status(section), dict)
        for client in (self.client, admin):
            with self.refused(Status.E_INVALID):
                client._call(Op.STATUS, wire.REQUESTS[Op.STATUS].pack(section=99), None)

    def test_status_has_the_members_of_the_page(self) -> None:
        text = PROTOCOL.read_text()
        start = text.index("| section | members |")
        # A daemon with one device has no other to exchange with.
        rows = [r for r in text[start : text.index("\n\n", start)].splitlines()[2:] if not r.startswith("| `exchange`")]
        wanted = set(re.findall("`(\\w+)`", "\n".join(rows)))
        self.client.reserve([self.opened], KEYS[:1])
        admin = self.other(self.daemon.admin)
        found: set[str] = set()
        for section in ("summary", "clients", "leases", "keys", "namespaces", "fsck", "tenants"):
            found |= _members(admin.status(section))
        self.assertEqual(found, wanted)

    def test_an_admin_tool_finds_namespaces_by_number(self) -> None:
        admin = self.other(self.daemon.admin)
        (ns,) = [n["ns"] for n in admin.status("namespaces")["namespaces"] if n["model"] == self.opened.namespace.model]
        self.assertEqual(admin.lookup(self.opened._replace(ns=ns), KEYS[:4]).n_hits, 3)
        with self.refused(Status.E_DENIED):
            admin.region_create(self.opened, 1)

    def test_small_print(self) -> None:
        client, opened = self.client, self.opened
        self.assertEqual(client.reserve([opened], KEYS[3:4]).ttl_ms, 0)
        lease = client.reserve([opened], KEYS[:1], max_loads=1)
        client.load(opened, self.region, [], lease=lease, n=0)  # Counts like any other.
        with self.refused(Status.E_STATE):
            client.load(opened, self.region, [], lease=lease, n=1)
        for _ in range(2):
            self.assertEqual(client.pin(opened, KEYS[1:2]), [0])
        for _ in range(2):
            self.assertEqual(client.unpin(opened, KEYS[1:2]), [0])
        self.assertEqual(client.drop(opened, KEYS[1:2]), [0])


def _members(value: object) -> set[str]:
    """Names of the members of all objects in `value`, but for those of "formats"."""
    if isinstance(value, dict):
        return set(value).union(*(_members(v) for k, v in value.items() if k != "formats"))
    return set().union(*map(_members, value)) if isinstance(value, list) else set()


class Timing(WithDaemon):
    def setUp(self) -> None:
        super().setUp()
        self.region = self.client.region_create(self.opened, 4)
        self.stored(self.region, 2)

    def test_cancel(self) -> None:
        slots = self.client.slot_take(self.region, 2)
        pending = self.client.submit_load(self.opened, self.region, KEYS[:2], slots, sync=Sync(3, 1, 3, 7))
        busy = self.client.load(self.opened, self.region, KEYS[:1], slots[:1], partial=True)
        self.assertEqual(busy[0].status, Status.E_BUSY)
        self.assertEqual(self.client.cancel(pending), 1)
        with self.assertRaises(CancelledError) as caught:
            pending.wait()
        self.assertEqual([r.status for r in caught.exception.results], [Status.E_CANCELLED] * 2)
        self.assertEqual(self.client.wait_signal(3, 7, 5), Status.E_CANCELLED)
        self.client.counters.clear_error(3)
        self.assertEqual(self.client.counters.signalled(3), (7, 0))
        self.assertEqual(self.client.cancel(pending), 0)
        with self.refused(Status.E_INVALID):
            self.client.cancel(self.client._next_id)  # It names itself.

    def test_a_load_that_was_given_up_holds_nothing(self) -> None:
        client = self.client
        held = client.load(self.opened, self.region, KEYS[:1])  # This one is on the device.
        client.slot_drop(self.region, [r.ref for r in held])
        pending = client.submit_load(self.opened, self.region, KEYS[:2], sync=Sync(10, 1))
        self.assertEqual(client.cancel(pending), 1)
        for wait, error, status in (
            (pending.wait, CancelledError, Status.E_CANCELLED),
            (lambda: client.load(self.opened, self.region, KEYS[:2], sync=Sync(10, 1), deadline=0.05), DeadlineError,
             Status.E_DEADLINE),
        ):  # fmt: skip
            with self.assertRaises(error) as caught:
                wait()
            self.assertEqual([tuple(r) for r in caught.exception.results], [(status, 0, NONE, 0)] * 2)
            slots = client.slot_take(self.region, 4)
            client.slot_drop(self.region, slots)
            held = client.load(self.opened, self.region, KEYS[:1])
            client.slot_drop(self.region, [r.ref for r in held])
        failed = client.load(self.opened, self.region, KEYS[5:6], partial=True)
        self.assertEqual([tuple(r) for r in failed], [(Status.E_NOT_FOUND, 0, NONE, 0)])

    def test_a_region_in_use_is_not_closed(self) -> None:
        slots = self.client.slot_take(self.region, 1)
        waiting = self.client.submit_load(self.opened, self.region, KEYS[:1], slots, sync=Sync(11, 1))
        with self.refused(Status.E_BUSY):
            self.client.region_close(self.region)
        self.assertEqual(self.client.slot_drop(self.region, slots), [0])  # At once; freed when the LOAD has ended.
        with self.refused(Status.E_NO_SPACE):
            self.client.slot_take(self.region, 4)
        self.client.counters.advance(11, 1)
        self.assertEqual(waiting.wait()[0].status, 0)
        self.assertEqual(len(self.client.slot_take(self.region, 4)), 4)
        self.client.region_close(self.region)

    def test_deadline(self) -> None:
        start = time.monotonic()
        with self.assertRaises(DeadlineError) as caught:
            self.client.load(self.opened, self.region, KEYS[:2], sync=Sync(4, 1, 4, 1), deadline=0.05)
        self.assertTrue(0.05 <= time.monotonic() - start < 2)
        self.assertEqual([r.status for r in caught.exception.results], [Status.E_DEADLINE] * 2)
        self.assertEqual(self.client.counters.signalled(4), (1, Status.E_DEADLINE))  # Signalled before the reply.

    def test_one_job_waits_for_another(self) -> None:
        first = self.client.submit_load(self.opened, self.region, KEYS[:1], sync=Sync(5, 2, 5, 1))
        second = self.client.submit_load(
            self.opened, self.region, KEYS[1:2], sync=Sync(wire.DAEMON_COUNTER | 5, 1, 6, 1)
        )
        self.client.counters.advance(5, 1)
        self.client.poll()
        self.assertEqual(self.client.counters.signalled(6), (0, 0))
        self.client.counters.advance(5, 2)
        self.assertEqual((second.wait()[0].status, first.wait()[0].status), (0, 0))

    def test_slot_drop_after_a_counter(self) -> None:
        slots = self.client.slot_take(self.region, 1)
        with self.refused(Status.E_DEADLINE):
            self.client.slot_drop(self.region, slots, after_counter=7, after_value=1, deadline=0.05)
        self.client.counters.advance(7, 1)
        self.assertEqual(self.client.slot_drop(self.region, slots, after_counter=7, after_value=1), [0])

    def test_a_refusal_is_signalled(self) -> None:
        with self.refused(Status.E_RANGE):
            self.client.load(
                self.opened, self.region, KEYS[:1], [Slot(9)], sync=Sync(signal_counter=8, signal_value=2)
            )
        self.assertEqual(self.client.counters.signalled(8), (2, Status.E_RANGE))
        for sync in (Sync(256, 1), Sync(0, 1 << 62), Sync(signal_counter=wire.DAEMON_COUNTER)):
            with self.refused(Status.E_RANGE):
                self.client.load(self.opened, self.region, KEYS[:1], sync=sync)

    def test_credit(self) -> None:
        granted = self.client.hello.credit_requests
        self.client.load(self.opened, self.region, KEYS[:1])  # On the device: the others need no slot.
        waiting = [
            self.client.submit_load(self.opened, self.region, KEYS[:1], sync=Sync(9, 1)) for _ in range(granted)
        ]
        with self.refused(Status.E_BUSY):
            self.client.lookup(self.opened, KEYS[:1])
        self.assertEqual(self.client.ping(b"control"), b"control")
        self.client.counters.advance(9, 1)
        self.assertEqual({w.wait()[0].status for w in waiting}, {0})


class Kernels(WithDaemon):
    """WRITE and DECODE against attention in fp64."""

    def test_write_and_decode(self) -> None:
        for form in (Format.MLA_BF16, Format.MLA_FP16):
            with self.subTest(form.name):
                self._attend(form)

    def _attend(self, form: Format) -> None:
        client, rng = self.client, random.Random(7)
        heads, tokens, scale = 2, 7, 1 / math.sqrt(576)
        opened = client.open(mla_namespace("attention", 2, 4, format=form))
        region, scratch = client.region_create(opened, 8), client.scratch_create(1 << 16)
        slots = sorted(client.slot_take(region, 4), reverse=True)
        table = [slots[0].slot, slots[2].slot]
        self.assertGreater(min(table), 0)
        # Rows of both planes at 0, queries at 32 KiB, output at 40 KiB, lse at 48 KiB; each plane's behind the other's.
        cache = [[_values(rng, form, 576) for _ in range(tokens)] for _ in range(2)]
        queries = [[_values(rng, form, 576) for _ in range(heads)] for _ in range(2)]
        mapping = [table[t // 4] * 4 + t % 4 for t in range(tokens)]
        writes, decodes = [], []
        for plane in range(2):
            rows, query, out, lse = plane * 16384, 32768 + plane * 4096, 40960 + plane * 4096, 49152 + plane * 16
            for t, row in enumerate(cache[plane]):
                scratch.write(rows + t * 1152, _packed(form, row))
            for h, row in enumerate(queries[plane]):
                scratch.write(query + h * 1152, _packed(form, row))
            writes.append(WriteCall(plane, scratch.number, rows, 1152, rows + 1024, 1152))
            decodes.append(
                DecodeCall(
                    plane, scratch.number, scale, query, heads * 1152, 1152, query + 1024, heads * 1152, 1152,
                    out, heads * 1024, 1024, lse, heads * 4, 4, signal_counter=plane, signal_value=1,
                )  # fmt: skip
            )
        self.assertEqual([r.status for r in client.write(opened, region, writes, mapping)], [0, 0])
        self.assertEqual(
            region.read(table[1] * region.slot_stride + PAGE + 1152, 1152), _packed(form, cache[1][5])
        )
        results = client.decode(opened, region, decodes, [tokens], [table], h_q=heads)
        self.assertEqual([(r.status, r.bad) for r in results], [(0, 0)] * 2)
        for plane in range(2):
            self.assertEqual(client.wait_signal(plane, 1, 5), 0)
            for h in range(heads):
                want, want_lse = _attention(queries[plane][h], cache[plane], scale)
                got = _unpacked(form, scratch.read(40960 + plane * 4096 + h * 1024, 1024))
                self.assertLess(max(abs(a - b) for a, b in zip(got, want)), 4e-3)
                (lse,) = struct.unpack("<f", scratch.read(49152 + plane * 16 + h * 4, 4))
                self.assertAlmostEqual(lse, want_lse, places=4)

    def test_sees_what_it_should(self) -> None:
        client, opened = self.client, self.opened
        region, scratch = client.region_create(opened, 4), client.scratch_create(1 << 16)
        slot = client.slot_take(region, 2)[1]
        rng = random.Random(3)
        cache = [_values(rng, Format.MLA_BF16, 576) for _ in range(3)]
        for t, row in enumerate(cache):
            scratch.write(t * 1152, _packed(Format.MLA_BF16, row))
        client.write(
            opened, region, [WriteCall(0, scratch.number, 0, 1152, 1024, 1152)], [slot.slot * 4 + t for t in range(3)]
        )
        # Three query tokens of one sequence: of 3 tokens the last is seen by the last query only; then 2 tokens.
        call = DecodeCall(0, scratch.number, 0.05, 0, 1152, 1152, 1024, 1152, 1152, 8192, 1024, 1024, 16384, 4, 4)
        for length in (3, 2):
            client.decode(opened, region, [call], [length], [[slot.slot]], h_q=1, s_q=3)
            for j in range(3):
                want, want_lse = _attention(cache[j], cache[: length - 3 + j + 1], 0.05)
                got = _unpacked(Format.MLA_BF16, scratch.read(8192 + j * 1024, 1024))
                self.assertLess(max(abs(a - b) for a, b in zip(got, want)), 4e-3)
                (lse,) = struct.unpack("<f", scratch.read(16384 + 4 * j, 4))
                if want_lse == -math.inf:
                    self.assertEqual(lse, -math.inf)
                else:
                    self.assertAlmostEqual(lse, want_lse, places=4)

    def test_refused(self) -> None:
        client, opened = self.client, self.opened
        region, scratch = client.region_create(opened, 4), client.scratch_create(4096)
        slot = client.slot_take(region, 1)[0]
        good = WriteCall(0, scratch.number, 0, 1152, 1024, 1152)
        for call, mapping, status in (
            (good._replace(plane=2), [slot.slot * 4], Status.E_RANGE),
            (good._replace(kv_c_offset=4096), [slot.slot * 4], Status.E_RANGE),
            (good._replace(kv_c_stride=1022), [slot.slot * 4, slot.slot * 4 + 1], Status.E_INVALID),
            (good._replace(k_pe_offset=1025), [slot.slot * 4], Status.E_INVALID),
            (good._replace(scratch=99), [slot.slot * 4], Status.E_NOT_FOUND),
            (good, [16], Status.E_RANGE), (good, [(slot.slot + 1) * 4], Status.E_STATE),
        ):  # fmt: skip
            with self.subTest(call=call, mapping=mapping), self.refused(status):
                client.write(opened, region, [call], mapping)
        self.assertEqual(client.write(opened, region, [good], [-1])[0].status, 0)
        one_row = good._replace(kv_c_stride=3, k_pe_stride=0)  # Not looked at.
        self.assertEqual(client.write(opened, region, [one_row], [slot.slot * 4])[0].status, 0)
        with self.refused(Status.E_LIMIT):
            client.write(opened, region, [good], [])
        with self.refused(Status.E_PROTO):
            client._call(Op.EXTEND, b"", None)

    def test_extend(self) -> None:
        """A prefix is there; the rows of the suffix are written and its queries attend, with a counter between."""
        client, opened, rng = self.client, self.opened, random.Random(5)
        region, scratch = client.region_create(opened, 8), client.scratch_create(1 << 16)
        slots = client.slot_take(region, 5)
        tables = [[slots[4].slot, slots[1].slot], [slots[2].slot, slots[3].slot]]
        lengths, queries, scale = [7, 5], [3, 2], 0.05
        caches = [[_values(rng, Format.MLA_BF16, 576) for _ in range(n)] for n in lengths]
        asked = [_values(rng, Format.MLA_BF16, 576) for _ in range(sum(queries))]
        place = lambda i, t: tables[i][t // 4] * 4 + t % 4  # noqa: E731
        at = 0
        for suffix in (False, True):
            mapping = []
            for i, (n, s) in enumerate(zip(lengths, queries)):
                for t in range(n - s, n) if suffix else range(n - s):
                    scratch.write(at + 1152 * len(mapping), _packed(Format.MLA_BF16, caches[i][t]))
                    mapping.append(place(i, t))
            call = WriteCall(0, scratch.number, at, 1152, at + 1024, 1152)
            if suffix:
                written = client.submit_write(opened, region, [call], mapping, sync=Sync(signal_counter=0, signal_value=1))
            else:
                client.write(opened, region, [call], mapping)
            at += 16384
        for j, row in enumerate(asked):
            scratch.write(32768 + j * 1152, _packed(Format.MLA_BF16, row))
        call = DecodeCall(
            0, scratch.number, scale, 32768, 1152, 1152, 33792, 1152, 1152, 49152, 1024, 1024, 60000, 4, 4,
            after_counter=wire.DAEMON_COUNTER, after_value=1, signal_counter=1, signal_value=1,
        )  # fmt: skip
        results = client.extend(opened, region, [call], [0, 3, 5], lengths, tables, h_q=1, n_tokens=6)
        self.assertEqual([(r.status, r.bad) for r in results], [(0, 0)])
        self.assertEqual(written.wait()[0].status, 0)
        self.assertEqual(client.wait_signal(1, 1, 5), 0)
        for j in range(5):
            i, seen = (0, 5 + j) if j < 3 else (1, 1 + j)
            want, want_lse = _attention(asked[j], caches[i][:seen], scale)
            got = _unpacked(Format.MLA_BF16, scratch.read(49152 + j * 1024, 1024))
            self.assertLess(max(abs(a - b) for a, b in zip(got, want)), 4e-3)
            (lse,) = struct.unpack("<f", scratch.read(60000 + 4 * j, 4))
            self.assertAlmostEqual(lse, want_lse, places=4)
        good = call._replace(after_counter=NONE, after_value=0)
        for start, status in (
            ([0, 4, 3], Status.E_RANGE), ([-1, 3, 5], Status.E_RANGE), ([0, 3, 7], Status.E_RANGE),
        ):  # fmt: skip
            with self.subTest(start=start), self.refused(status):
                client.extend(opened, region, [good], start, lengths, tables, h_q=1, n_tokens=6)
        with self.refused(Status.E_LIMIT):
            client.extend(opened, region, [good], [0, 0, 0], lengths, tables, h_q=1)
        with self.assertRaises(ValueError):
            client.extend(opened, region, [good], [0, 3], lengths, tables, h_q=1)

    def test_decodes_that_are_refused(self) -> None:
        client, opened = self.client, self.opened
        region, scratch = client.region_create(opened, 4), client.scratch_create(1 << 16)
        slot = client.slot_take(region, 1)[0]
        good = DecodeCall(
            0, scratch.number, 1.0, 0, 2048, 1024, 4096, 256, 128, 8192, 2048, 1024, 16384, 8, 4,
            signal_counter=0, signal_value=1,
        )  # fmt: skip
        shape = {"seq_len": [1], "block_table": [[slot.slot]], "h_q": 2, "s_q": 1}
        self.assertEqual(client.decode(opened, region, [good], **shape)[0].status, 0)
        for call, change, status in (
            (good, {"h_q": 0}, Status.E_LIMIT), (good, {"h_q": 129}, Status.E_LIMIT),
            (good, {"s_q": 9}, Status.E_LIMIT), (good._replace(parts=257), {}, Status.E_LIMIT),
            (good, {"seq_len": [], "block_table": []}, Status.E_LIMIT), (None, {}, Status.E_LIMIT),
            (good, {"block_table": [[(slot.slot + 1) % 4]]}, Status.E_STATE),
            (good, {"block_table": [[4]]}, Status.E_RANGE), (good, {"seq_len": [5]}, Status.E_RANGE),
            (good._replace(out_head=0), {}, Status.E_INVALID), (good._replace(out_head=1023), {}, Status.E_INVALID),
            (good._replace(q_nope_token=0), {}, Status.E_INVALID), (good._replace(lse_head=2), {}, Status.E_INVALID),
            (good._replace(sm_scale=math.inf), {}, Status.E_INVALID), (good._replace(plane=2), {}, Status.E_RANGE),
        ):  # fmt: skip
            fine = good._replace(signal_counter=1)
            calls = [fine, call] if call is not None else []
            with self.subTest(call=call, change=change):
                for index in (0, 1):
                    client.counters.clear_error(index)
                with self.refused(status):
                    client.decode(opened, region, calls, **{**shape, **change})
                for index in range(len(calls)):  # One bad field refuses the request, and every call is told.
                    self.assertEqual(client.counters.signalled(index), (1, status))


class Refusals(WithDaemon):
    """Bytes that no careful client sends."""

    def raw(self, op: int, body: bytes, **options: object) -> object:
        return self.client._call(op, body, None, **options)  # type: ignore[arg-type]

    def test_bodies(self) -> None:
        for body, status in (
            (b"", Status.E_PROTO), (b"short", Status.E_PROTO), (bytes(16), Status.E_PROTO),
            (struct.pack("<II", 0, 1), Status.E_PROTO), (struct.pack("<II", 999, 0), Status.E_NOT_FOUND),
        ):  # fmt: skip
            with self.subTest(body=body), self.refused(status):
                self.raw(Op.LOOKUP, body)
        with self.assertRaisesRegex(WireError, "LOOKUP: a body of [0-9]+ bytes; the daemon takes [0-9]+"):
            self.raw(Op.LOOKUP, bytes(self.client.hello.max_body + 8))
        with self.refused(Status.E_INVALID):
            self.raw(Op.REGION_CLOSE, struct.pack("<II", 1, 1))
        load, store = wire.REQUESTS[Op.LOAD], wire.REQUESTS[Op.STORE]
        region = self.client.region_create(self.opened, 2)
        place = {"ns": self.opened.ns, "region": region.number, "after_counter": NONE, "signal_counter": NONE}
        one = {"key": KEYS[:1], "slot": [ANY_SLOT]}
        for body in (
            load.pack(one, n=1, lease_first=1, **place), load.pack(one, n=1, lease=b"x" * 16, **place),
            load.pack({**one, "slot": [ANY_SLOT._replace(gen=1)]}, n=1, **place),
        ):  # fmt: skip
            with self.subTest(body=body), self.refused(Status.E_INVALID):
                self.raw(Op.LOAD, body)
        with self.refused(Status.E_INVALID):
            self.raw(Op.STORE, store.pack(parent=KEYS[0], **place))
        self.raw(Op.STORE, store.pack(first_depth=1, **place))  # A parent that is not known is zeros.
        with self.refused(Status.E_STATE):
            self.raw(Op.HELLO, wire.REQUESTS[Op.HELLO].pack(version_min=1, version_max=1))
        with self.refused(Status.E_PROTO):
            self.raw(Op.LOOKUP, bytes(8), fds=[0])
        with self.refused(Status.E_LIMIT):
            self.raw(Op.PING, bytes(65))
        good = mla_namespace("m", 1, 4).canonical()
        for description, status in (
            (good[:-8], Status.E_PROTO), (good + bytes(8), Status.E_PROTO),
            (good[:4] + b"\2" + good[5:], Status.E_UNSUPPORTED), (good[:8] + bytes(4) + good[12:], Status.E_LIMIT),
        ):  # fmt: skip
            with self.subTest(description=description[:16]), self.refused(status):
                self.raw(Op.OPEN, description)
        self.assertEqual(self.client.ping(b"well"), b"well")

    def test_a_broken_frame_ends_the_connection(self) -> None:
        header = wire.pack_frame(Op.PING, 1000, b"")
        for bad in (b"X" + header[1:], header[:22] + b"\1" + header[23:], header[:18] + b"\xff" + header[19:]):
            with Client(self.daemon.socket) as client:
                client._sock.send(bad)
                with self.assertRaises(AwayError):
                    client.ping()
                self.assertTrue(client.closed)

    def test_versions(self) -> None:
        with Client(self.daemon.socket) as client:
            self.assertEqual(client.hello.version, 1)
        def hello(low: int, high: int, name: bytes = b"") -> bytes:
            body = wire.REQUESTS[Op.HELLO].pack({"name": name}, version_min=low, version_max=high, name_len=len(name))
            return wire.pack_frame(Op.HELLO, 1, body)

        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(5)
            plain.connect(self.daemon.socket)
            for frame, status in (
                (hello(2, 3), Status.E_VERSION), (hello(0, 1), Status.E_INVALID), (hello(2, 1), Status.E_INVALID),
                (hello(1, 1, b"two\nlines"), Status.E_INVALID), (hello(1, 1, b"\xff"), Status.E_INVALID),
                (wire.pack_frame(Op.PING, 1, b""), Status.E_STATE), (wire.pack_frame(999, 1, b""), Status.E_STATE),
                (hello(1, 9, "ä b".encode()), Status.OK),
            ):  # fmt: skip
                plain.sendall(frame)
                head = wire.unpack_header(plain.recv(32, socket.MSG_WAITALL))
                self.assertEqual((head.status, head.id), (status, 1), frame)
                plain.recv(head.body_len, socket.MSG_WAITALL)


class Loss(unittest.TestCase):
    """The daemon dies under its clients."""

    def test_kill(self) -> None:
        daemon = Daemon()
        client = Client(daemon.socket)
        self.addCleanup(client.close)
        opened = client.open(mla_namespace("loss", 2, 4))
        region = client.region_create(opened, 2)
        key = derive_key([1, 2, 3, 4])
        slots = client.slot_take(region, 1)
        waiting = client.submit_store(opened, region, [key], slots, sync=Sync(0, 1, 1, 5))
        self.assertEqual(daemon.stop(signal.SIGKILL), -signal.SIGKILL)
        with self.assertRaises(AwayError):
            waiting.wait()
        self.assertEqual(client.counters.signalled(1), ((1 << 63) - 1, Status.E_AWAY))
        self.assertEqual(client.counters.signalled(2), (0, 0))
        with self.assertRaises(AwayError):
            client.ping()
        region.write_slot(0, bytes(opened.slot_bytes))  # The memory is still there.

    def test_a_stop_answers_what_waits(self) -> None:
        daemon = Daemon("drain.timeout_ms=600000")
        self.addCleanup(daemon.stop)
        client = Client(daemon.socket)
        self.addCleanup(client.close)
        opened = client.open(mla_namespace("stop", 2, 4))
        region = client.region_create(opened, 2)
        slots = client.slot_take(region, 1)
        waiting = client.submit_store(opened, region, [derive_key([1])], slots, sync=Sync(0, 1, 1, 5))
        self.assertEqual(daemon.stop(), 0)
        with self.assertRaises(CancelledError) as caught:
            waiting.wait()
        self.assertEqual(caught.exception.results, [Status.E_CANCELLED])
        self.assertEqual(client.counters.signalled(1), (5, Status.E_CANCELLED))

    def test_a_region_survives_a_restart(self) -> None:
        first = Daemon()
        old = Client(first.socket)
        self.addCleanup(old.close)
        space, key = mla_namespace("restart", 2, 4), derive_key([1, 2, 3, 4])
        opened = old.open(space)
        region = old.region_create(opened, 4)
        slots = old.slot_take(region, 2)
        block = random.randbytes(opened.slot_bytes)
        region.write_slot(slots[0].slot, block)
        old.store(opened, region, [key], slots[:1], keep=True)
        self.assertEqual(first.stop(), 0)
        second = Daemon()
        self.addCleanup(second.stop)
        client = Client(second.socket)
        self.addCleanup(client.close)
        self.assertNotEqual(client.hello.boot_id, old.hello.boot_id)
        opened = client.open(space)
        entries = [Entry(*slots[0], 1, 0, key), Entry(*slots[1]), Entry(9, 1)]
        again, statuses = client.region_reoffer(opened, region, entries)
        self.assertEqual(statuses, [0, 0, Status.E_RANGE])
        self.assertEqual(client.lookup(opened, [key]).n_hits, 0)  # The pool is empty; the device is not.
        found = client.load(opened, again, [key])
        self.assertEqual([(r.flags, r.ref) for r in found], [(LOAD_SHARED | LOAD_NO_COPY, slots[0])])
        client.slot_drop(again, slots[:1])
        self.assertEqual(client.store(opened, again, [key], slots[:1]), [0])
        out = [bytearray(opened.slot_bytes)]
        client.load_buffers(opened, again, [key], out)
        self.assertEqual(out[0], block)


def _values(rng: random.Random, form: Format, n: int) -> list[float]:
    """Random values that `form` holds exactly."""
    return _unpacked(form, _packed(form, [rng.uniform(-1, 1) for _ in range(n)]))


def _packed(form: Format, values: Sequence[float]) -> bytes:
    if form == Format.MLA_FP16:
        return struct.pack(f"<{len(values)}e", *values)
    words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
    return struct.pack(f"<{len(values)}H", *((w + 0x7FFF + (w >> 16 & 1)) >> 16 for w in words))


def _unpacked(form: Format, data: bytes) -> list[float]:
    n = len(data) // 2
    if form == Format.MLA_FP16:
        return list(struct.unpack(f"<{n}e", data))
    return list(struct.unpack(f"<{n}f", struct.pack(f"<{n}I", *(w << 16 for w in struct.unpack(f"<{n}H", data)))))


def _attention(query: Sequence[float], rows: Sequence[Sequence[float]], scale: float) -> tuple[list[float], float]:
    """Output (512 values) and lse of one query of 576 values over rows of 576; the value of a row is its first 512."""
    if not rows:
        return [0.0] * 512, -math.inf
    scores = [scale * math.fsum(q * k for q, k in zip(query, row)) for row in rows]
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    out = [math.fsum(w * row[i] for w, row in zip(weights, rows)) / total for i in range(512)]
    return out, top + math.log(total)


if __name__ == "__main__":
    unittest.main()
