"""PROTOCOL.md against the package: tables, numbers, dumps and test vectors."""

from __future__ import annotations

import re
import unittest

from kvstride import wire
from kvstride.backend import Backend, backend_of, stride_order
from kvstride.errors import Status, WireError
from kvstride.layout import Format, Namespace, derive_key, mla_namespace
from kvstride.wire import Op

from support import PROTOCOL

TEXT = PROTOCOL.read_text()
DUMPS = {
    m[1]: bytes.fromhex("".join(line[4:] for line in m[2].splitlines()))
    for m in re.finditer(r"^```hex (\w+)\n(.*?)^```", TEXT, re.M | re.S)
}
VECTORS = {"namespace", "namespace_digest", "deepseek_digest", "key_first", "key_second", "key_salt", "key_adapter"}
OPS = {"region_reoffer": Op.REGION_ATTACH, "refusal": Op.LOAD}


def op_of(dump: str) -> Op:
    stem = re.sub("_re[pq]$", "", dump)
    return OPS.get(stem) or Op[stem.upper()]


class Document(unittest.TestCase):
    def test_tables(self) -> None:
        seen = set()
        for name, rows in re.findall(r"^\*\*`(\w+)`\*\*, [^\n]*\n\n\|[^\n]*\n\|[-|]*\n((?:\|[^\n]*\n)+)", TEXT, re.M):
            offset, fields = 0, []
            for row in rows.splitlines():
                at, size, kind, field = [c.strip().strip("`") for c in row.split("|")[1:5]]
                self.assertEqual(int(at), offset, f"{name}.{field}")
                offset += int(size)
                fields.append((field, kind))
            self.assertIn(name, wire.TABLES)
            self.assertEqual(fields, wire.TABLES[name].fields, name)
            self.assertEqual(offset, wire.TABLES[name].size, name)
            seen.add(name)
        self.assertEqual(wire.TABLES.keys() - seen, {"reply_head"})

    def test_numbers(self) -> None:
        section = TEXT[TEXT.index("## 13.") :]
        numbers = {name: int(n) for n, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.M)}
        self.assertEqual(numbers, {**Op.__members__, **Status.__members__})
        formats = re.findall(r"^\| (\d+) \| `(\w+)` \| \d*(?:yours)? *\|", TEXT[TEXT.index("## 9.") :], re.M)
        self.assertEqual({n.upper(): int(i) for i, n in formats}, dict(Format.__members__))

    def test_backends(self) -> None:
        rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (blocks|layers) first \|", TEXT, re.M)
        self.assertEqual({n: int(i) for i, n, _ in rows}, dict(Backend.__members__))
        for _, name, first in rows:
            self.assertEqual(stride_order(backend_of(name), True)[0], 1 if first == "blocks" else 0, name)
            self.assertEqual(stride_order(backend_of(name), False), (0, 1, 2))
        self.assertEqual(backend_of("MLA_COMMON"), Backend.OTHER)

    def test_every_operation_has_dumps(self) -> None:
        for op in Op:
            if op != Op.EVENT:
                self.assertLessEqual({f"{op.name.lower()}_req", f"{op.name.lower()}_rep"}, DUMPS.keys())


class Dumps(unittest.TestCase):
    """Every frame of the document is read, and made again from what was read."""

    def test_frames(self) -> None:
        for name in DUMPS.keys() - VECTORS:
            with self.subTest(name):
                data = DUMPS[name]
                head = wire.unpack_header(data)
                body = data[wire.HEADER_BYTES :]
                self.assertEqual(len(body), head.body_len)
                self.assertEqual(head.op, op_of(name))
                if name == "event":
                    layout, message = wire.EVENT_BODY, None
                elif name.endswith("_req"):
                    layout, message = wire.REQUESTS[Op(head.op)], None
                else:
                    message, body = wire.unpack_reply(body)
                    layout = wire.REPLIES[Op(head.op)] if head.status in (Status.OK, Status.E_PARTIAL) else None
                if layout is None or layout.table is None:
                    again = body
                else:
                    row, arrays = layout.unpack(body)
                    again = layout.pack(arrays, **row._asdict())
                if message is not None:
                    again = wire.pack_reply(message, again)
                frame = wire.pack_frame(
                    head.op, head.id, again, n_fds=head.n_fds, deadline_us=head.deadline_us, status=head.status
                )
                self.assertEqual(frame, data)

    def test_values(self) -> None:
        row, arrays = wire.REPLIES[Op.LOAD].unpack(wire.unpack_reply(DUMPS["load_rep"][32:])[1])
        self.assertEqual(row, (2, 2))
        self.assertEqual([tuple(r) for r in arrays["result"]], [(0, 1, 2, 7001), (0, 1, 3, 7001)])
        message, payload = wire.unpack_reply(DUMPS["refusal"][32:])
        self.assertEqual((message, payload), ("region: 9 is not known", b""))
        row, arrays = wire.REQUESTS[Op.DECODE].unpack(DUMPS["decode_req"][32:])
        self.assertEqual((arrays["call"][0].sm_scale, arrays["seq_len"], arrays["block_table"]), (0.125, [7], [0, 1]))
        self.assertEqual(wire.REQUESTS[Op.WRITE].unpack(DUMPS["write_req"][32:]).arrays["slot_mapping"], [6, -1])

    def test_damage_is_refused(self) -> None:
        body = DUMPS["lookup_rep"][32 + 8 :]
        for bad in (body[:-1], body + bytes(8), body[:-1] + b"\1"):
            with self.assertRaises(WireError):
                wire.REPLIES[Op.LOOKUP].unpack(bad)
        with self.assertRaises(WireError):
            wire.unpack_header(b"KVS2" + DUMPS["ping_req"][4:32])
        with self.assertRaises(WireError):
            wire.unpack_reply(bytes.fromhex("0500000000000000") + b"hello\0\0\1")
        with self.assertRaisesRegex(WireError, r"key\[0\]: 31 bytes"):
            wire.REQUESTS[Op.LOOKUP].pack({"key": [bytes(31)]}, ns=0, n_keys=1)
        with self.assertRaisesRegex(WireError, r"key\[1\]: str"):
            wire.REQUESTS[Op.LOOKUP].pack({"key": [bytes(32), "a" * 32]}, ns=0, n_keys=2)
        with self.assertRaisesRegex(WireError, r"slot\[0\]: int"):
            wire.REQUESTS[Op.SLOT_DROP].pack({"slot": [7]}, region=0, n=1)
        with self.assertRaises(WireError):
            wire.REQUESTS[Op.LOOKUP].pack({"key": []}, ns=0, n_keys=1)


class Stream(unittest.TestCase):
    def test_bytes_in_any_pieces(self) -> None:
        stream = DUMPS["ping_rep"] + DUMPS["watch_rep"] + DUMPS["event"]
        for size in (1, 7, 33, len(stream)):
            reader, frames = wire.FrameReader(), []
            for at in range(0, len(stream), size):
                frames += reader.feed(stream[at : at + size])
            self.assertEqual([f.op for f in frames], [Op.PING, Op.WATCH, Op.EVENT])

    def test_descriptors_go_in_order(self) -> None:
        stream = DUMPS["ping_rep"] + DUMPS["hello_rep"] + DUMPS["region_create_rep"]
        cut = len(DUMPS["ping_rep"]) + 1
        reader = wire.FrameReader()
        frames = reader.feed(stream[:cut], [70]) + reader.feed(stream[cut:], [71])
        self.assertEqual([f.fds for f in frames], [[], [70], [71]])

    def test_descriptors_that_do_not_fit(self) -> None:
        with self.assertRaises(WireError):
            wire.FrameReader().feed(DUMPS["hello_rep"])
        reader = wire.FrameReader()
        with self.assertRaises(WireError):
            reader.feed(DUMPS["ping_rep"], [70])
        self.assertEqual(reader.take_fds(), [70])


class Vectors(unittest.TestCase):
    def test_namespace(self) -> None:
        tiny = mla_namespace("tiny", 2, 4, weights="rev1")
        self.assertEqual(tiny.canonical(), DUMPS["namespace"])
        self.assertEqual(tiny.digest(), DUMPS["namespace_digest"])
        self.assertEqual(Namespace.parse(DUMPS["namespace"]), tiny)
        self.assertEqual(DUMPS["open_req"][32:], DUMPS["namespace"])
        deepseek = mla_namespace("deepseek-v3", 61, 64)
        self.assertEqual(len(deepseek.canonical()), 2984)
        self.assertEqual(deepseek.digest(), DUMPS["deepseek_digest"])

    def test_keys(self) -> None:
        first = derive_key([1, 2, 3, 4])
        self.assertEqual(first, DUMPS["key_first"])
        self.assertEqual(derive_key([5, 6, 7, 8], first), DUMPS["key_second"])
        self.assertEqual(derive_key([1, 2, 3, 4], salt=b"X"), DUMPS["key_salt"])
        self.assertEqual(derive_key([1, 2, 3, 4], adapter=b"X"), DUMPS["key_adapter"])


if __name__ == "__main__":
    unittest.main()
