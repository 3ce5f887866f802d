"""A natural logarithm made of + - * / only: library logarithms differ in the last bit between processors."""

from __future__ import annotations

import math


def ln(x: float) -> float:
    """ln x = e ln 2 + 2 artanh((m - 1) / (m + 1)) with x = m 2^e, 1/sqrt 2 <= m < sqrt 2, by its series."""
    m, e = math.frexp(x)
    if m < 0.7071067811865476:
        m, e = 2.0 * m, e - 1
    z = (m - 1.0) / (m + 1.0)
    square, total = z * z, 0.0
    for k in range(25, 0, -2):
        total = total * square + 1.0 / k
    return e * 0.6931471805599453 + 2.0 * z * total
