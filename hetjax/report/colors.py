"""One colour per worker, the same in every picture and for every number of workers."""

from __future__ import annotations

# M. Okabe, K. Ito: Color Universal Design, 2008. Told apart with every common form of colour blindness.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#5A5A5A", "#8C7A00")

# How far each further eight workers are mixed towards white or black: never so far that the hue is lost.
_SHADES = ((0, 0), (0.22, 255), (0.25, 0), (0.38, 255), (0.4, 0), (0.5, 255), (0.52, 0), (0.56, 255))


def worker_colour(worker: int) -> str:
    """Neighbours differ in hue; each further eight workers take the same hues lighter and darker by turns."""
    base = [int(_HUES[worker % 8][place : place + 2], 16) for place in (1, 3, 5)]
    strength, target = _SHADES[worker // 8 % 8]
    mixed = [round(part + (target - part) * strength) for part in base]
    return "#{:02X}{:02X}{:02X}".format(*mixed)


def run_colour(run: int) -> str:
    """The colour of a run where several are compared."""
    return worker_colour(run)
