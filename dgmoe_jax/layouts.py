"""Which rows are real, and whose: the layouts of rows that grouped GEMMs read, as data.

In both layouts an expert's rows are dense, in (token, slot) order, from the start of its segment:

contiguous  segments one after another, each starting at a multiple of `alignment`; `m_indices
            [rows]` names each row's expert, -1 for padding.
masked      a segment ("slab") of `capacity` rows for every expert; `masked_m [E]` counts its rows.

The kernels of this package see neither: they walk `tiles [3, N]` int32: expert (-1: no tile), first
row, number of live rows (0: no tile). Live tiles come first, in expert order. Rows from the live
ones up to the next multiple of `alignment` belong to the tile and may be written; others may not.
"""

from __future__ import annotations


def contiguous_rows(num_assignments: int, num_experts: int, alignment: int) -> int:
    """Rows that no routing of `num_assignments` (token, slot) pairs can exceed.

    Worst case: as many experts as possible hold one row each, and the others fill up
    whole segments (the compact-layout bound of SGLang's `_get_compact_all_tokens`).
    """
    return alignment * num_tiles(num_assignments, num_experts, alignment)


def num_tiles(num_assignments: int, num_experts: int, tile: int) -> int:
    """Tiles of `tile` rows, each of one expert, that no routing can exceed."""
    nonempty = min(num_assignments, num_experts)
    return nonempty + (num_assignments - nonempty) // tile
