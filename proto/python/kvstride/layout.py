"""Namespaces and keys: the canonical bytes of a description, its digest, and derived block keys (sections 9 and 10)."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Iterable, Sequence

from .errors import KvstrideError
from .wire import ZERO_KEY, pad8

_HEAD = struct.Struct("<10I")
_PLANE = struct.Struct("<24sIIIIQ")
_MAGIC = 0x534E564B
_VERSION = 1
MAX_TOKENS = 4096
MAX_PLANES = 1024
MAX_TAG = 255
MAX_BYTES = 1 << 40


class LayoutError(KvstrideError, ValueError):
    """A description or a key's input that the protocol does not allow; the text names field, value and limit."""


class Format(IntEnum):
    """What the bytes of a plane are."""

    MLA_BF16 = 1
    MLA_FP16 = 2
    MLA_FP8 = 3
    FP8_DS_MLA = 4
    INDEXER_FP8 = 5
    KV_BF16 = 6
    KV_FP16 = 7
    KV_FP8 = 8
    RAW = 9
    MLA_FP32 = 10
    FP8_BLK584 = 11
    FP8_BLK528 = 12


ROW_BYTES: dict[Format, int] = {
    Format.MLA_BF16: 1152,
    Format.MLA_FP16: 1152,
    Format.MLA_FP8: 576,
    Format.FP8_DS_MLA: 656,
    Format.INDEXER_FP8: 132,
    Format.MLA_FP32: 2304,
    Format.FP8_BLK584: 584,
    Format.FP8_BLK528: 528,
}
"""Bytes a token, where the format fixes them."""

PAGE_ALIGN: dict[Format, int] = {Format.FP8_BLK584: 576, Format.FP8_BLK528: 512}
"""What a plane's `page_bytes` is a multiple of, where that is not 16."""

_ALIASES = {
    "bf16": Format.MLA_BF16,
    "bfloat16": Format.MLA_BF16,
    "fp16": Format.MLA_FP16,
    "float16": Format.MLA_FP16,
    "half": Format.MLA_FP16,
    "fp8": Format.MLA_FP8,
}


def format_of(name: str) -> Format:
    """The format of a name such as "mla_bf16" or an MLA alias such as "bf16". LayoutError: none, or "auto"."""
    if name == "auto":
        raise LayoutError('format "auto" must be resolved first')
    if name in _ALIASES:
        return _ALIASES[name]
    for known in Format:
        if known.name.lower() == name:
            return known
    raise LayoutError(f"format {name!r} is not known")


class Shard(IntEnum):
    """How a model's cache is split over ranks."""

    REPLICATED = 0
    HEADS = 1
    LAYERS = 2


@dataclass(frozen=True)
class Plane:
    """One plane of a block. `row_bytes`: bytes a token, 0: the format's own; `page_bytes`: bytes of the plane in a
    block, 0: the least multiple of 16 (`PAGE_ALIGN`) that holds its rows (filled in by `Namespace`)."""

    name: str
    layer: int
    format: Format
    row_bytes: int = 0
    page_bytes: int = 0


@dataclass(frozen=True)
class Namespace:
    """Everything that makes two caches the same.

    `model`: 1..255 bytes of UTF-8; `weights`: 0..255; `tokens_per_block`: 1..4096; `planes`: 1..1024, in the order in
    which they lie in a block; `shard_a` <= shard < `shard_b` of `shard_n`, all 0 if replicated.
    LayoutError: a value that the protocol does not allow.
    """

    model: str
    weights: str
    tokens_per_block: int
    planes: Sequence[Plane]
    shard: Shard = Shard.REPLICATED
    shard_a: int = 0
    shard_b: int = 0
    shard_n: int = 0

    def __post_init__(self) -> None:
        _within("tokens_per_block", self.tokens_per_block, 1, MAX_TOKENS)
        _within("n_planes", len(self.planes), 1, MAX_PLANES)
        _tag("model", self.model, 1)
        _tag("weights", self.weights, 0)
        if self.shard == Shard.REPLICATED:
            if self.shard_a or self.shard_b or self.shard_n:
                raise LayoutError("shard_a, shard_b and shard_n are 0 if replicated")
        elif not 0 <= self.shard_a < self.shard_b <= self.shard_n < 1 << 32:
            raise LayoutError(f"shard {self.shard_a}..{self.shard_b} of {self.shard_n}: a < b <= n")
        object.__setattr__(self, "planes", tuple(self._filled(p) for p in self.planes))
        if self.slot_bytes >= MAX_BYTES:
            raise LayoutError(f"slot_bytes {self.slot_bytes} is not below {MAX_BYTES}")

    def _filled(self, plane: Plane) -> Plane:
        if not re.fullmatch("[a-z0-9_]{1,23}", plane.name):
            raise LayoutError(f"plane name {plane.name!r}: [a-z0-9_], 1..23 bytes")
        if plane.format not in tuple(Format):
            raise LayoutError(f"{plane.name}.format {plane.format!r}: a Format; format_of has those of an engine's names")
        fixed = ROW_BYTES.get(plane.format, 0)
        row = plane.row_bytes or fixed
        _within(f"{plane.name}.layer", plane.layer, 0, 0xFFFFFFFF)
        _within(f"{plane.name}.row_bytes", row, 1, 0xFFFFFFFF)
        if fixed and row != fixed:
            raise LayoutError(f"{plane.name}.row_bytes {row}: format {plane.format.name} has {fixed}")
        rows = row * self.tokens_per_block
        align = PAGE_ALIGN.get(plane.format, 16)
        page = plane.page_bytes or rows + -rows % align
        _within(f"{plane.name}.page_bytes", page, 16, MAX_BYTES - 16)
        if page % align or page < rows:
            raise LayoutError(f"{plane.name}.page_bytes {page}: a multiple of {align}, at least {rows}")
        return Plane(plane.name, plane.layer, Format(plane.format), row, page)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block."""
        return sum(p.page_bytes for p in self.planes)

    @property
    def plane_offsets(self) -> list[int]:
        """Bytes from the start of a block to each plane."""
        offsets = [0]
        for plane in self.planes:
            offsets.append(offsets[-1] + plane.page_bytes)
        return offsets[:-1]

    def canonical(self) -> bytes:
        """The canonical description, as OPEN sends it."""
        model, weights = self.model.encode(), self.weights.encode()
        head = _HEAD.pack(
            _MAGIC, _VERSION, self.tokens_per_block, len(self.planes), self.shard,
            self.shard_a, self.shard_b, self.shard_n, len(model), len(weights),
        )  # fmt: skip
        planes = (_PLANE.pack(p.name.encode(), p.layer, p.format, p.row_bytes, 0, p.page_bytes) for p in self.planes)
        return head + pad8(model) + pad8(weights) + b"".join(planes)

    def digest(self) -> bytes:
        """SHA-256 of the canonical description, 32 bytes."""
        return hashlib.sha256(self.canonical()).digest()

    @classmethod
    def parse(cls, data: bytes) -> Namespace:
        """The namespace of canonical bytes. LayoutError: cut off, left over, a second spelling, or a bad value."""
        try:
            magic, version, tokens, n_planes, shard, a, b, n, model_len, weights_len = _HEAD.unpack_from(data)
            if magic != _MAGIC or version != _VERSION:
                raise LayoutError(f"magic {magic:#x}, version {version}: not a description of version {_VERSION}")
            model_end = _HEAD.size + model_len
            weights_at = model_end + -model_end % 8
            weights_end = weights_at + weights_len
            at = weights_end + -weights_end % 8
            planes = []
            for i in range(n_planes):
                name, layer, form, row, _, page = _PLANE.unpack_from(data, at + i * _PLANE.size)
                planes.append(Plane(name.rstrip(b"\0").decode(), layer, Format(form), row, page))
            made = cls(
                data[_HEAD.size : model_end].decode(), data[weights_at:weights_end].decode(),
                tokens, planes, Shard(shard), a, b, n,
            )  # fmt: skip
        except LayoutError:
            raise
        except (struct.error, ValueError) as error:
            raise LayoutError(f"description: {error}") from None
        if made.canonical() != bytes(data):
            raise LayoutError("description: not the one spelling of what it says")
        return made


def mla_namespace(
    model: str, layers: int, tokens_per_block: int, *, weights: str = "", format: Format = Format.MLA_BF16
) -> Namespace:
    """A replicated namespace of one plane "latent" for each of `layers` layers."""
    planes = [Plane("latent", layer, format) for layer in range(layers)]
    return Namespace(model, weights, tokens_per_block, planes)


def derive_key(tokens: Sequence[int], parent: bytes = ZERO_KEY, *, salt: bytes = b"", adapter: bytes = b"") -> bytes:
    """The 32-byte key of a block of `tokens` (1..4096 ids below 2^32) behind the block of key `parent`.

    LayoutError: too few or too many tokens, an id out of range, or a parent that is not 32 bytes.
    """
    _within("tokens", len(tokens), 1, MAX_TOKENS)
    if len(parent) != 32:
        raise LayoutError(f"parent: {len(parent)} bytes, not 32")
    try:
        ids = struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        at, token = next((i, t) for i, t in enumerate(tokens) if not _is_token(t))
        raise LayoutError(f"tokens[{at}] {token!r}: a whole number of 0..{(1 << 32) - 1}") from None
    digest = hashlib.sha256()
    for tag, data in ((b"V", b"kvstride-key-1"), (b"P", parent), (b"S", salt), (b"A", adapter), (b"T", ids)):
        digest.update(tag + struct.pack("<Q", len(data)) + data)
    return digest.digest()


def derive_chain(
    tokens: Sequence[int], tokens_per_block: int, *, salt: bytes = b"", adapter: bytes = b""
) -> list[bytes]:
    """Keys of the whole blocks of a prompt, first block first; tokens behind the last whole block have none.

    LayoutError: as of `derive_key`, or tokens_per_block outside 1..4096.
    """
    _within("tokens_per_block", tokens_per_block, 1, MAX_TOKENS)
    keys: list[bytes] = []
    for at in range(0, len(tokens) - tokens_per_block + 1, tokens_per_block):
        block = tokens[at : at + tokens_per_block]
        keys.append(derive_key(block, keys[-1] if keys else ZERO_KEY, salt=salt, adapter=adapter))
    return keys


def _is_token(token: object) -> bool:
    try:
        struct.pack("<I", token)
    except struct.error:
        return False
    return True


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LayoutError(f"{what} {value}: {low}..{high}")


def _tag(what: str, text: str, low: int) -> None:
    try:
        _within(f"{what} bytes", len(text.encode()), low, MAX_TAG)
    except UnicodeEncodeError:
        raise LayoutError(f"{what}: surrogates have no UTF-8") from None
    if _has_control(text):
        raise LayoutError(f"{what}: control characters")


def _has_control(text: Iterable[str]) -> bool:
    return any(ord(c) < 0x20 or 0x7F <= ord(c) <= 0x9F for c in text)
