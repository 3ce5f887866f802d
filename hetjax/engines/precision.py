"""The compute dtype of each kind of device.

Parameters, the optimizer, model state and sums stay float32 (or as wide as the parameters); the loss function and its
gradient are computed in the dtype that suits the worker's device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

log = logging.getLogger("hetjax")
Tree = Any
ComputeDtype = Any  # a dtype or its name, a mapping from kinds of device to such, or None

DEFAULT = "default"  # key of a mapping for all other kinds of device
_DTYPES = ("float32", "bfloat16", "float16")
_WITHOUT_BFLOAT16 = {
    "t4",
    "v100",
    "p100",
    "p40",
    "p4",
    "k80",
}  # NVIDIA's data center GPUs before the A100, in lower case


def dtypes_by_kind(given: ComputeDtype) -> dict[str, str]:
    """Check a user's compute dtype and return it as a mapping; empty if the model's own dtypes are kept.

    Raises:
        TypeError: if a key of a mapping is not a string.
        ValueError: if a dtype is unknown.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        given = {DEFAULT: given}
    if wrong := [kind for kind in given if not isinstance(kind, str)]:
        raise TypeError(
            f"compute_dtype has the key {wrong[0]!r}: expected kinds of device or platforms, as in "
            '{"Tesla T4": "float16", "cpu": "float32", "default": "bfloat16"}.'
        )
    return {kind: _name(dtype) for kind, dtype in given.items()}


def _name(given: Any) -> str:
    try:
        name = jnp.dtype(given).name if given is not None else ""
    except TypeError:
        name = ""
    if name not in _DTYPES:
        raise ValueError(
            f"compute_dtype is {given!r}: expected one of {', '.join(_DTYPES)}, or a mapping from kinds of device to "
            'them, such as {"Tesla T4": "float16", "cpu": "float32", "default": "bfloat16"}.'
        )
    return name


def dtype_of(kind: str, dtypes: Mapping[str, str]) -> str | None:
    """The compute dtype of a kind, 'platform:model'.

    That of its model, else of words in it ('T4' of 'Tesla T4'), else of its platform, else the default.
    """
    return next((dtypes[key] for key in (*_keys_of(kind, dtypes), DEFAULT) if key in dtypes), None)


def _keys_of(kind: str, dtypes: Mapping[str, str]) -> list[str]:
    """The keys that match a kind, the most specific first."""
    platform, _, model = kind.partition(":")
    words = [key for key in dtypes if key != DEFAULT and _words(key) and _words(key) <= _words(model)]
    return [key for key in (kind, model, *words, platform) if key in dtypes]


def _words(name: str) -> set[str]:
    return set(name.replace("-", " ").lower().split())


def warn_of_bfloat16(kinds: Iterable[str]) -> None:
    """Log a warning if devices that compute in bfloat16 have no hardware for it."""
    if emulating := [kind for kind in kinds if _words(kind.partition(":")[2]) & _WITHOUT_BFLOAT16]:
        log.warning(
            "%s has no bfloat16 (CUDA compute capability below 8.0): it is emulated and slow. Give this kind another "
            "dtype, as in compute_dtype={'T4': 'float16', 'default': 'bfloat16'} or --compute-dtype "
            "T4=float16,default=bfloat16.",
            ", ".join(emulating),
        )


def warn_of_unused(kinds: Iterable[str], dtypes: Mapping[str, str]) -> None:
    """Log a warning if keys match none of these kinds, those of all workers: they may be misspelled."""
    kinds = list(kinds)
    used = {DEFAULT}.union(*(_keys_of(kind, dtypes) for kind in kinds))
    if unused := [key for key in dtypes if key not in used]:
        log.warning(
            "No worker matches %s of compute_dtype; the workers are of kind %s. Check the spelling, unless such "
            "devices join later.",
            " and ".join(map(repr, unused)), " and ".join(map(repr, kinds)),
        )  # fmt: skip


def common_dtype(kinds: Iterable[str], dtypes: Mapping[str, str]) -> str | None:
    """The compute dtype of devices that share one program.

    Raises:
        ValueError: if their kinds have different ones.
    """
    found = {kind: dtype_of(kind, dtypes) for kind in kinds}
    if len(set(found.values())) > 1:
        chosen = ", ".join(f"{kind}: {dtype or 'as the model'}" for kind, dtype in found.items())
        raise ValueError(
            f"compute_dtype gives the workers different dtypes ({chosen}), but this engine is one program over all of "
            "them. Use engine='chunked', or one dtype."
        )
    return next(iter(found.values()))


def cast(tree: Tree, dtype: str) -> Tree:
    """Cast floating-point arrays; integers, keys and complex numbers are unchanged."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def announce(kinds: Iterable[str], dtypes: Mapping[str, str]) -> None:
    """Log the compute dtype of every kind, with warnings of bfloat16 without hardware and of what float16 means."""
    found = {kind: dtype for kind in kinds if (dtype := dtype_of(kind, dtypes)) is not None}
    for kind, dtype in found.items():
        log.info("%s computes in %s.", kind, dtype)
    warn_of_bfloat16(kind for kind, dtype in found.items() if dtype == "bfloat16")
    if halves := [kind for kind, dtype in found.items() if dtype == "float16"]:
        log.warning(
            "%s computes in float16, and hetjax does not scale the loss: gradients below 6e-8 become zero, and sums "
            "over a microbatch above 65,504 become infinite (see on_nonfinite). To scale by s, return "
            "hetjax.Example(s * loss, weight_b=s * ones), which changes neither the update nor the reported loss.",
            ", ".join(halves),
        )
