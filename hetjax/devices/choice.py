"""The choice of devices as text, parsed without JAX: `4`, `gpu`, `gpu+cpu`, `cuda:0,2+cpu`, `all`.

choice  = NUMBER | "all" | part ("+" part)*
part    = KIND [":" indices]                  KIND: gpu, cpu, tpu, cuda, rocm, or any platform that JAX knows
indices = range ("," range)*                  range: INDEX | FIRST "-" LAST, counted from 0
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hetjax.arguments import whole
from hetjax.environment import DEVICES

ALL, CPU = "all", "cpu"
_EXPECTED = "expected a number, all, or kinds such as gpu, gpu+cpu or cuda:0,2+cpu"
_PART = re.compile(r"([a-z][a-z0-9_]*)(?::([0-9,\- ]*))?")
_MOST = 4096  # indices in one choice


@dataclass(frozen=True)
class Selection:
    """Devices of one platform; without indices all of them, of CPUs the usual number."""

    platform: str
    indices: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.platform if self.indices is None else f"{self.platform}:{','.join(map(str, self.indices))}"


def parse(choice: str | int | None, environment: Mapping[str, str] = os.environ) -> int | tuple[Selection, ...] | None:
    """Parse a choice of devices.

    Args:
        choice: the choice; None: that of the variable HETJAX_DEVICES.
        environment: environment variables.

    Returns:
        A number of devices, the selected ones, or None without a choice. `all` is a selection of its own.

    Raises:
        ValueError: if this is no choice of devices.
    """
    if choice is None:
        choice = environment.get(DEVICES)
        if not choice:
            return None
    if not isinstance(choice, str):
        return whole("The number of devices", choice, 1)
    text = choice.strip().lower()
    if re.fullmatch(r"[+-]?\d+", text):
        return whole("The number of devices", int(text), 1)
    selected = tuple(_selection(part.strip(), choice) for part in text.split("+"))
    platforms = [part.platform for part in selected]
    if twice := [name for name in platforms if platforms.count(name) > 1]:
        raise ValueError(f"devices is {choice!r}, which names {twice[0]} twice: give its indices in one list.")
    if ALL in platforms and len(platforms) > 1:
        raise ValueError(f"devices is {choice!r}: all already means every device, so nothing can be added to it.")
    return selected


def _selection(part: str, choice: str) -> Selection:
    if not part:
        what = "is empty" if not choice.strip() else f"is {choice!r}, in which a kind is missing beside +"
        raise ValueError(f"devices {what}: {_EXPECTED}.")
    if part.isdigit():
        raise ValueError(
            f"devices is {choice!r}: a number stands alone. For {part} of a kind, write gpu:0-1 or cpu:0-3."
        )
    if (match := _PART.fullmatch(part)) is None:
        raise ValueError(f"devices is {choice!r}: {part!r} is no kind of device; {_EXPECTED}.")
    platform, indices = match.groups()
    if indices is None:
        return Selection(platform)
    if platform == ALL:
        raise ValueError(f"devices is {choice!r}: all takes no indices; give them to a kind, such as gpu:0,2.")
    numbers: list[int] = []
    for item in indices.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", item)
        first, last = (0, -1) if found is None else (int(found[1]), int(found[2] or found[1]))
        if not first <= last < first + _MOST:
            raise ValueError(
                f"devices is {choice!r}: {item.strip()!r} is no index; expected numbers from 0, such as "
                f"{platform}:0,2 or {platform}:0-3."
            )
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"devices is {choice!r}, which lists a device twice: each worker needs a device of its own.")
    return Selection(platform, tuple(numbers))
