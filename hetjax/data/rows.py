"""Host rows of one step, by their positions in the global order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Tree = Any


@dataclass(frozen=True)
class Rows:
    """Host rows of one step: `tree` holds the samples at positions origin, origin + 1, ... of the epoch's order."""

    tree: Tree
    origin: int

    @property
    def stop(self) -> int:
        return self.origin + len(jax.tree.leaves(self.tree)[0])

    def block(self, start: int, size: int) -> Tree:
        """`size` rows from position `start`. Beyond the end the last row is repeated: real rows, never zeros.

        A block may reach into the neighbour's samples; they are masked there, and a view costs no copy.
        """
        at, have = start - self.origin, self.stop - self.origin
        if at >= 0 and at + size <= have:
            return jax.tree.map(lambda x: x[at : at + size], self.tree)
        index = np.clip(np.arange(at, at + size), 0, have - 1)
        return jax.tree.map(lambda x: x[index], self.tree)
