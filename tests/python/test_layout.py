"""Descriptions and keys that the protocol does not allow."""

from __future__ import annotations

import unittest

from kvstride.layout import (
    Format, LayoutError, Namespace, Plane, Shard, derive_chain, derive_key, format_of, mla_namespace,
)  # fmt: skip

LATENT = Plane("latent", 0, Format.MLA_BF16)


class Layouts(unittest.TestCase):
    def test_offsets(self) -> None:
        space = Namespace("m", "", 3, [LATENT, Plane("indexer", 0, Format.INDEXER_FP8), Plane("k", 1, Format.RAW, 5)])
        self.assertEqual([p.page_bytes for p in space.planes], [3456, 400, 16])
        self.assertEqual(space.plane_offsets, [0, 3456, 3856])
        blockwise = [Plane("a", 0, Format.FP8_BLK584), Plane("b", 0, Format.FP8_BLK528)]
        self.assertEqual([p.page_bytes for p in Namespace("m", "", 64, blockwise).planes], [37440, 33792])
        self.assertEqual(space.slot_bytes, 3872)
        self.assertEqual(Namespace.parse(space.canonical()), space)

    def test_format_is_not_a_text(self) -> None:
        with self.assertRaisesRegex(LayoutError, "latent.format 'auto'"):
            mla_namespace("m", 1, 64, format="auto")  # type: ignore[arg-type]

    def test_shard(self) -> None:
        space = Namespace("modèle", "fp8 é", 1, [LATENT], Shard.LAYERS, 0, 30, 61)
        self.assertEqual(Namespace.parse(space.canonical()), space)
        for a, b, n in ((1, 1, 2), (2, 1, 2), (0, 3, 2)):
            with self.assertRaises(LayoutError):
                Namespace("m", "", 1, [LATENT], Shard.HEADS, a, b, n)
        with self.assertRaises(LayoutError):
            Namespace("m", "", 1, [LATENT], Shard.REPLICATED, 0, 1, 1)

    def test_refused(self) -> None:
        for arguments in (
            ("", "", 1, [LATENT]), ("m" * 256, "", 1, [LATENT]), ("m", "w" * 256, 1, [LATENT]),
            ("m", "a\x07b", 1, [LATENT]), ("m\x85", "", 1, [LATENT]), ("\ud800", "", 1, [LATENT]),
            ("m", "", 0, [LATENT]), ("m", "", 4097, [LATENT]), ("m", "", 1, []), ("m", "", 1, [LATENT] * 1025),
            ("m", "", 1, [Plane("Latent", 0, Format.RAW, 1)]), ("m", "", 1, [Plane("l" * 24, 0, Format.RAW, 1)]),
            ("m", "", 1, [Plane("", 0, Format.RAW, 1)]), ("m", "", 1, [Plane("k", 0, Format.RAW)]),
            ("m", "", 1, [Plane("k", 0, Format.MLA_BF16, 576)]), ("m", "", 2, [Plane("k", 0, Format.RAW, 16, 16)]),
            ("m", "", 1, [Plane("k", 0, Format.RAW, 16, 24)]), ("m", "", 1, [Plane("k", 0, Format.RAW, 1, 1 << 40)]),
            ("m", "", 64, [Plane("k", 0, Format.FP8_BLK584, 0, 37376)]),
        ):  # fmt: skip
            with self.subTest(arguments[:3]), self.assertRaises(LayoutError):
                Namespace(*arguments)

    def test_second_spellings(self) -> None:
        good = mla_namespace("tiny", 1, 4).canonical()
        for bad in (good[:-1], good + bytes(8), good[:20], good[:45] + b"x" + good[46:], b"X" + good[1:]):
            with self.assertRaises(LayoutError):
                Namespace.parse(bad)

    def test_formats(self) -> None:
        self.assertEqual(format_of("half"), Format.MLA_FP16)
        self.assertEqual(format_of("kv_fp8"), Format.KV_FP8)
        for bad in ("auto", "KV_FP8", "int4"):
            with self.assertRaises(LayoutError):
                format_of(bad)

    def test_keys(self) -> None:
        chain = derive_chain(list(range(1, 11)), 4)
        self.assertEqual(chain, [derive_key([1, 2, 3, 4]), derive_key([5, 6, 7, 8], derive_key([1, 2, 3, 4]))])
        self.assertNotEqual(derive_key([1], salt=b"ab", adapter=b"c"), derive_key([1], salt=b"a", adapter=b"bc"))
        for bad in ([], [1] * 4097, [-1], [1 << 32]):
            with self.assertRaises(LayoutError):
                derive_key(bad)
        with self.assertRaises(LayoutError):
            derive_key([1], b"short")
        with self.assertRaisesRegex(LayoutError, r"^tokens\[2\] -1: a whole number of 0\.\.4294967295$"):
            derive_key([1, 2, -1, "x"])
        with self.assertRaisesRegex(LayoutError, r"^tokens_per_block 0: 1\.\.4096$"):
            derive_chain([1, 2], 0)


if __name__ == "__main__":
    unittest.main()
