"""The client against a daemon of a few lines that answers badly, or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
import threading
import time
import unittest
from typing import Callable

from kvstride import wire
from kvstride.client import Client, Opened
from kvstride.errors import AwayError, KvstrideError, WireError
from kvstride.layout import mla_namespace
from kvstride.region import make_memfd
from kvstride.wire import Op

Answer = Callable[["Fake", wire.Frame], bool]


class Fake:
    """Serves one connection. `answer` is asked first: True, it has dealt with the frame."""

    def __init__(self, answer: Answer = lambda fake, frame: False) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "s")
        self.answer = answer
        self.seen: list[int] = []
        self.over = False
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.thread.join()
        self.listener.close()
        self.folder.cleanup()

    def serve(self) -> None:
        self.conn, _ = self.listener.accept()
        reader = wire.FrameReader()
        with self.conn:
            self.conn.settimeout(0.05)
            while not self.over:
                try:
                    data, fds, _, _ = socket.recv_fds(self.conn, 1 << 16, wire.MAX_FDS)
                except TimeoutError:
                    continue
                except OSError:
                    return
                if not data:
                    return
                for frame in reader.feed(data, fds):
                    self.seen.append(frame.op)
                    if not self.answer(self, frame):
                        self.reply(frame)
                    for fd in frame.fds:
                        os.close(fd)

    def reply(self, frame: wire.Frame, payload: bytes | None = None, fds: tuple[int, ...] = ()) -> None:
        page = -1
        if payload is None and frame.op == Op.HELLO:
            page = make_memfd("page", wire.COUNTER_PAGE_BYTES)
            fds = (page,)
            payload = wire.HELLO_REP.pack(
                version=1, n_counters=wire.COUNTERS, max_body=1 << 20, max_keys=1000, credit_requests=8,
                control_requests=8, credit_bytes=1 << 30, default_deadline_us=100_000, max_deadline_us=1_000_000,
            )  # fmt: skip
        self.send(wire.pack_frame(frame.op, frame.id, wire.pack_reply("", payload or b""), n_fds=len(fds)), fds)
        if page >= 0:
            os.close(page)

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        with contextlib.suppress(BrokenPipeError):
            self.conn.sendmsg([data], rights)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def region_of(n_pieces: int) -> Answer:
    """A region whose piece is smaller than it says."""

    def answer(fake: Fake, frame: wire.Frame) -> bool:
        if frame.op != Op.REGION_CREATE:
            return False
        fd = make_memfd("piece", 4096)
        body = wire.REGION_REP.pack(region=7, bytes=8192, piece_bytes=8192, n_pieces=n_pieces)
        fake.reply(frame, body, (fd,))
        os.close(fd)
        return True

    return answer


class Sending(unittest.TestCase):
    def test_a_large_request_is_sent_to_its_end(self) -> None:
        """Who comes back to the rest later would be one that stalls in the middle."""

        def slow(fake: Fake, frame: wire.Frame) -> bool:
            time.sleep(0.3 if frame.op == Op.PING else 0)
            return False

        with Fake(slow) as fake, Client(fake.path) as client:
            client._submit(Op.PING, b"", deadline=5)
            client._submit(Op.PING, bytes(900_000), deadline=5)  # while nobody reads
            self.assertFalse(client._out)


class Descriptors(unittest.TestCase):
    def test_a_region_that_cannot_be_mapped_is_given_back(self) -> None:
        for n_pieces in (1, 2):
            with self.subTest(n_pieces), Fake(region_of(n_pieces)) as fake, Client(fake.path) as client:
                client.ping()  # the other thread has closed what it sent with HELLO
                before = open_fds()
                for _ in range(3):
                    with self.assertRaises(WireError):
                        client.scratch_create(8192)
                client.ping()
                self.assertEqual(open_fds(), before)
                self.assertEqual(fake.seen.count(Op.REGION_CLOSE), 3)

    def test_descriptors_that_cannot_be_duplicated(self) -> None:
        with Fake() as fake, Client(fake.path) as client:
            namespace = mla_namespace("m", 1, 4)
            opened = Opened(1, namespace.slot_bytes, namespace.digest(), namespace)
            good = make_memfd("own", 4096)
            client.ping()
            before = open_fds()
            with self.assertRaises(OSError):
                client.region_import(opened, 1, [good, good, -1])
            self.assertEqual(open_fds(), before)
            self.assertEqual(client._pending, {})
            os.close(good)
            client.ping()

    def test_descriptors_behind_a_reply_that_nobody_asked_for(self) -> None:
        def answer(fake: Fake, frame: wire.Frame) -> bool:
            if frame.op != Op.REGION_CREATE:
                return False
            fd = make_memfd("piece", 4096)
            bad = wire.pack_frame(Op.PING, 999, wire.pack_reply("", b""))
            body = wire.pack_reply("", wire.REGION_REP.pack(region=7, bytes=4096, piece_bytes=4096, n_pieces=1))
            fake.send(bad + wire.pack_frame(frame.op, frame.id, body, n_fds=1), (fd,))
            os.close(fd)
            return True

        before = open_fds()
        with Fake(answer) as fake, Client(fake.path) as client:
            with self.assertRaises(KvstrideError):
                client.scratch_create(4096)
            self.assertTrue(client.closed)
        self.assertEqual(open_fds(), before)


class Interrupted:
    """A socket on which one receive, or one send, is interrupted when it is done."""

    def __init__(self, real: socket.socket, call: str) -> None:
        self.real, self.call = real, call

    def __getattr__(self, name: str) -> object:
        real = getattr(self.real, name)
        if name != self.call:
            return real

        def interrupted(*args: object) -> object:
            self.call = ""
            real(*args)
            raise KeyboardInterrupt

        return interrupted


class Interruptions(unittest.TestCase):
    def test_no_frame_is_sent_or_lost_twice(self) -> None:
        for call in ("recvmsg", "sendmsg"):
            with self.subTest(call), Fake() as fake, Client(fake.path) as client:
                client._sock = Interrupted(client._sock, call)  # type: ignore[assignment]
                with self.assertRaises(KeyboardInterrupt):
                    client.ping(b"x")
                self.assertTrue(client.closed)
                with self.assertRaises(AwayError):
                    client.ping(b"y")
                time.sleep(0.1)
                self.assertLessEqual(fake.seen.count(Op.PING), 1)

    def test_what_an_interrupted_call_would_have_brought_is_closed(self) -> None:
        held: list[wire.Frame] = []

        def answer(fake: Fake, frame: wire.Frame) -> bool:
            if frame.op == Op.REGION_CREATE:
                held.append(frame)
                return True
            if frame.op == Op.PING and held:
                fd = make_memfd("piece", 4096)
                body = wire.REGION_REP.pack(region=7, bytes=4096, piece_bytes=4096, n_pieces=1)
                fake.reply(held[0], body, (fd,))
                os.close(fd)
            return False

        with Fake(answer) as fake, Client(fake.path) as client:
            pump = client._pump
            client.ping()
            before = open_fds()

            def interrupt(until: float, done: Callable[[], bool]) -> None:
                pump(0.0, done)
                client._pump = pump  # type: ignore[method-assign]
                raise KeyboardInterrupt

            sent = client._submit
            client._submit = lambda *a, **k: (sent(*a, **k), setattr(client, "_pump", interrupt))[0]  # type: ignore
            with self.assertRaises(KeyboardInterrupt):
                client.scratch_create(4096)
            client._submit = sent  # type: ignore[method-assign]
            client.ping()
            self.assertEqual(open_fds(), before)


class Deadlines(unittest.TestCase):
    def test_a_socket_that_always_has_more_does_not_prolong_a_wait(self) -> None:
        def answer(fake: Fake, frame: wire.Frame) -> bool:
            if frame.op == Op.PING:
                fake.send(wire.pack_frame(Op.EVENT, 0, wire.EVENT_BODY.pack({}, seq=1, lost=0, n=0)))
            return frame.op == Op.PING

        with Fake(answer) as fake, Client(fake.path, grace=0.1) as client:
            begin = time.monotonic()

            def take_nothing() -> None:
                if time.monotonic() > begin + 3:
                    raise AssertionError("it reads on and on")

            client._receive = take_nothing  # type: ignore[method-assign]
            with self.assertRaises(AwayError):
                client.ping(deadline=0.1)
            self.assertLess(time.monotonic() - begin, 3)
