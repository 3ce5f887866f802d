"""Accelerators that are not there: their compilers run without them, from a description in a small data file.

A TPU needs the name of its topology, a GPU the limits of its model. What is compiled for a target cannot be run here:
it proves neither speed nor numerics.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

FILES = Path(__file__).parent / "target_files"
_REQUIRED = {"device": str, "platform": str, "memory": int, "source": str}
_OPTIONAL = {"topology": str, "gpu": dict, "slow": dict}
_EXTRAS = {"cuda": "jax[cuda12]", "tpu": "jax[tpu]"}

# Limits that all of NVIDIA's models since compute capability 7.0 share; a file may give others.
_EVERY_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
_CUDNN = "platform_name: 'CUDA' dnn_version_info { major: 9 minor: 8 patch: 0 }"

# Operations of a compiled program that are known to be slow, as patterns of its text, by platform.
_SLOW_EVERYWHERE = {
    r"\bselect-and-scatter\(": "the gradient of max-pooling by reduce_window: pool by reshape and maximum",
    r"\bsort\(": "sorting",
    r"custom_call_target=\"xla_(ffi_)?python": "a call back to the host in every microbatch",
    r"is_host_transfer=true|\b(?:infeed|outfeed)\(": "a transfer between host and device inside the program",
}
_SLOW = {
    "cuda": _SLOW_EVERYWHERE,
    "tpu": _SLOW_EVERYWHERE | {r"\bf64\[": "float64 is emulated on TPU"},
}

_targets: dict[jax.Device, Target] = {}  # of the devices that were made here


@dataclass(frozen=True)
class Target:
    """A kind of accelerator to compile for.

    Attributes:
        name: as the user gave it.
        device: its name as JAX reports it.
        platform: 'cuda' or 'tpu'.
        memory: bytes of one device.
        source: where the figures come from.
        topology: of a TPU generation and chips, such as v5e:2x2; of GPUs hosts and GPUs of each, such as 1x1x2.
        gpu: of a GPU: the fields of XLA's description of it.
        slow: further slow operations: patterns of a program's text, each with an explanation.
    """

    name: str
    device: str
    platform: str
    memory: int
    source: str
    topology: str = ""
    gpu: Mapping[str, Any] = field(default_factory=dict, hash=False)
    slow: Mapping[str, str] = field(default_factory=dict, hash=False)

    def devices(self) -> list[jax.Device]:
        """The devices: programs can be compiled for them, and nothing can be run on them.

        Raises:
            ImportError: if the compiler is not installed.
            ValueError: if the compiler refuses the description, or the chips belong to several hosts.
        """
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # otherwise libtpu looks for a TPU's metadata server
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there need be no CUDA libraries, only XLA's
        grid = self.topology or "1x1x1"
        options = {"target_config": self._description(), "topology": grid} if self.platform == "cuda" else {}
        try:
            topology = topologies.get_topology_desc(grid, platform=self.platform, **options)
        except Exception as error:
            if _is_missing(error):
                raise ImportError(
                    f"The compiler for {self.name} is not installed: pip install 'hetjax[{self.platform}]', or "
                    f"'{_EXTRAS[self.platform]}' in the version of JAX here, {jax.__version__}."
                ) from error
            raise ValueError(
                f"The compiler for {self.platform} refuses {self.name}: {str(error).splitlines()[0]} Check the target."
            ) from error
        found: list[Any] = list(topology.devices)
        if len({int(device.process_index) for device in found}) > 1:
            raise ValueError(
                f"The {len(found)} chips of {self.name} belong to several hosts. Give the topology of one host, such "
                "as v5e:2x2."
            )
        _targets.update(dict.fromkeys(found, self))
        return found

    def slow_operations(self, text: str) -> dict[str, int]:
        """Operations in a program's text that are slow on this target: an explanation of each, and their number."""
        patterns = {**_SLOW[self.platform], **self.slow}
        found = {why: len(re.findall(pattern, text)) for pattern, why in patterns.items()}
        return {why: number for why, number in found.items() if number}

    def _description(self) -> str:
        return f"gpu_device_info {{ {_proto({**_EVERY_GPU, **self.gpu, 'device_memory_size': self.memory})} }} " + (
            f"{_CUDNN} device_description_str: '{self.device}'"
        )


def target_of(device: jax.Device) -> Target | None:
    """The target that a device stands for; None for a device that is there."""
    return _targets.get(device)


def names() -> list[str]:
    """Names of the targets that come with hetjax."""
    return sorted(path.stem for path in FILES.glob("*.toml"))


def target(name: str) -> Target:
    """Read a target.

    Args:
        name: its name, such as T4, T4:2 for two of them in one host, or v5e:2x2 with a topology of its own; or the path
            of a file like those that come with hetjax.

    Returns:
        The target.

    Raises:
        ValueError: if there is no such target, or the file is not a target.
        OSError: if the file cannot be read.
    """
    known, (stem, _, chips) = names(), name.partition(":")
    by_lower = {each.lower(): each for each in known}
    if name.endswith(".toml"):
        path, chips = Path(name), ""
    elif stem.lower() in by_lower:
        path = FILES / f"{by_lower[stem.lower()]}.toml"
    else:
        close = difflib.get_close_matches(stem.lower(), by_lower, 1, 0.4)
        hint = f" Did you mean {by_lower[close[0]]}?" if close else ""
        raise ValueError(
            f"There is no target {name!r}.{hint} Known: {', '.join(known)}, a TPU also with a topology, such as "
            "v5e:2x2; or give the path of a .toml file."
        )
    values = _read(path)
    if chips:
        if values["platform"] == "tpu":
            values["topology"] = f"{path.stem}:{chips}"
        elif re.fullmatch("[1-9][0-9]?", chips):
            values["topology"] = f"1x1x{chips}"
        else:
            raise ValueError(f"The target {name!r} has a topology, which only TPUs have: use {path.stem}:NUMBER.")
    return Target(name, **values)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}.") from error
    known = _REQUIRED | _OPTIONAL
    wrong = [key for key, value in values.items() if not isinstance(value, known.get(key, ()))]
    if wrong or (missing := [key for key in _REQUIRED if key not in values]):
        what = f"its {wrong[0]!r} is unknown or of the wrong type" if wrong else f"{missing[0]!r} is missing"
        raise ValueError(
            f"{path} is not a target: {what}. A target has {', '.join(_REQUIRED)}, and may have "
            f"{', '.join(_OPTIONAL)}; see {FILES / 'T4.toml'}."
        )
    needed = {"cuda": "gpu", "tpu": "topology"}.get(values["platform"])
    if needed is None or needed not in values:
        raise ValueError(
            f"{path} is not a target: expected platform 'cuda' with a table [gpu], or 'tpu' with a topology, got "
            f"platform {values['platform']!r}."
        )
    return values


def _proto(values: Mapping[str, Any]) -> str:
    """Protocol buffer text of nested fields."""
    return " ".join(
        f"{key} {{ {_proto(value)} }}" if isinstance(value, Mapping) else f"{key}: {value}"
        for key, value in values.items()
    )


def _is_missing(error: Exception) -> bool:
    """Whether an error says that there is no compiler for a platform: JAX has no common type for that."""
    return isinstance(error, NotImplementedError | ImportError) or "support not installed" in str(error)
