"""Attention backends and the order of layers and blocks that each was verified with (PROTOCOL.md, REGION_IMPORT)."""

from __future__ import annotations

from enum import IntEnum


class Backend(IntEnum):
    """Who attends to memory that is imported. A name is the engine's own; any other one is `OTHER`."""

    TRITON_MLA = 1
    CUTLASS_MLA = 2
    FLASH_ATTN_MLA = 3
    FLASHMLA = 4
    FLASHINFER_MLA = 5
    DEEPSEEK_V32_INDEXER = 6
    OTHER = 7


BACKEND_OVERRIDE = 1 << 31
"""Beside a backend: take the strides whether it was verified with them or not."""

_BLOCKS_FIRST = frozenset(
    (Backend.TRITON_MLA, Backend.CUTLASS_MLA, Backend.FLASH_ATTN_MLA, Backend.FLASHMLA, Backend.FLASHINFER_MLA)
)


def backend_of(name: str) -> Backend:
    """The backend of an engine's name for it; `Backend.OTHER` for every name that is not known."""
    return Backend.__members__.get(name, Backend.OTHER)


def stride_order(backend: int, with_layers: bool) -> tuple[int, ...]:
    """Dimensions (layer, block, token, content), or without the layer, outermost first, as the backend was verified:
    (0, 1, 2, 3) is one tensor a layer, (1, 0, 2, 3) blocks that hold all layers."""
    if not with_layers:
        return (0, 1, 2)
    return (1, 0, 2, 3) if backend in _BLOCKS_FIRST else (0, 1, 2, 3)
