"""Which rows are real, and whose: the layouts of rows that grouped GEMMs read, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contiguous:
    """Experts' rows one after another; each expert's segment starts at a multiple of `alignment`.

    `m_indices [rows]` names each row's expert; padding rows hold -1.
    """

    alignment: int

    def rows(self, num_assignments: int, num_experts: int) -> int:
        """Rows that no routing of `num_assignments` (token, slot) pairs can exceed.

        Worst case: as many experts as possible hold one row each, and the others fill up
        whole segments (the compact-layout bound of SGLang's `_get_compact_all_tokens`).
        """
        nonempty = min(num_assignments, num_experts)
        return self.alignment * (nonempty + (num_assignments - nonempty) // self.alignment)
