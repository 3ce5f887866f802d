"""Accelerators of this machine that JAX does not use: why, and what to type. No run is on the CPU silently."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax
from jax.extend.backend import backends

from hetjax.devices.accelerators import accelerators
from hetjax.devices.choice import CPU

log = logging.getLogger("hetjax")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PLUGINS = {"cuda": r"jax-(cuda\d+)-plugin", "rocm": r"jax-(rocm\d+)-plugin", "tpu": "lib(tpu)"}  # group 1: JAX's extra
_SHOWS = {"cuda": "nvidia-smi", "rocm": "rocm-smi"}
_INSTALL = {"cuda": "cuda12", "tpu": "tpu"}  # CUDA 12 runs on older drivers and GPUs than 13; ROCm is no extra
_chosen: set[frozenset[jax.Device]] = set()  # CPU devices that the user chose by name


def cpu_chosen(devices: Iterable[jax.Device]) -> None:
    """Remember that the user chose these devices with the name of the CPU: they need no warning."""
    _chosen.add(frozenset(devices))


def warn_unless_chosen(devices: Sequence[jax.Device]) -> None:
    """Call `warn_of_unused` if these are all devices of a JAX on the CPU, unless the user chose the CPU by name."""
    if devices[0].platform == CPU and set(devices) == set(jax.devices()) and frozenset(devices) not in _chosen:
        warn_of_unused()


@functools.cache
def warn_of_unused() -> None:
    """Log, once in a process whose JAX is on the CPU, which accelerators it leaves unused."""
    if sentence := unused_here():
        log.warning("%s", sentence)


def unused_here() -> str | None:
    """A sentence on the accelerators of this machine that JAX leaves unused; None if there are none."""
    installed = {re.sub(r"[-_.]+", "-", x.name).lower(): x.version for x in metadata.distributions()}
    return unused(list(backends()), installed, jax.config.values.get("jax_platforms"))


def unused(
    used: list[str],
    installed: Mapping[str, str],
    platforms: str | None,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> str | None:
    """A sentence on the accelerators that JAX leaves unused; None if there are none.

    Args:
        used: The platforms that JAX runs on.
        installed: Versions of the installed packages, by name.
        platforms: The setting JAX_PLATFORMS.
        environment: Environment variables.
        root: Root of the file system.
    """
    found = accelerators({name: value for name, value in environment.items() if name != _VISIBLE}, root)
    if nodes := list(root.glob("dev/nvidia[0-9]*")):  # containers may lack the driver's files
        found.setdefault("cuda", ["NVIDIA GPU"] * len(nodes))
    hidden = _VISIBLE in environment and "cuda" not in accelerators(environment, root)
    reasons = [
        f"This machine has {' and '.join(dict.fromkeys(models))}, but JAX is on the CPU: "
        + _reason(platform, installed, platforms, environment[_VISIBLE] if platform == "cuda" and hidden else None)
        for platform, models in found.items()
        if platform not in used
    ]
    return " ".join(reasons) or None


def _reason(platform: str, installed: Mapping[str, str], platforms: str | None, visible: str | None) -> str:
    """Why JAX does not use a platform, and what to type."""
    if platforms and not {platform, "gpu" if platform != "tpu" else platform} & set(platforms.split(",")):
        return f"JAX_PLATFORMS is {platforms!r}. Type: unset JAX_PLATFORMS"
    plugins = {name: match[1] for name in installed if (match := re.fullmatch(_PLUGINS[platform], name))}
    if not plugins:
        if platform not in _INSTALL:
            return "its plugin is not installed. See https://docs.jax.dev/en/latest/installation.html"
        return f'its plugin is not installed. Type: pip install "jax[{_INSTALL[platform]}]=={installed["jax"]}"'
    (plugin, extra), jaxlib = next(iter(plugins.items())), installed["jaxlib"]
    if platform == "cuda" and all(installed[name] != jaxlib for name in plugins):
        return (
            f"{plugin} {installed[plugin]} is not the version of jaxlib, {jaxlib}, so JAX ignores it. Type: "
            f'pip install "jax[{extra}]=={installed["jax"]}", and restart Python'
        )
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}. Type: unset CUDA_VISIBLE_DEVICES"
    shows = f", and {_SHOWS[platform]} to see whether its driver works" if platform in _SHOWS else ""
    return (
        f'{plugin} {installed[plugin]} could not start. Type: JAX_PLATFORMS={platform} python -c "import jax; '
        f'jax.devices()" to see its error{shows}'
    )
