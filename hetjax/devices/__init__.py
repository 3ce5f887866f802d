"""Devices: which ones, how they become workers, their memory, and programs compiled for them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


class _CallablePackage(ModuleType):
    """`hetjax.devices` is this package and, as a user expects, the function that chooses devices.

    Python sets `hetjax.devices` to the package as soon as anything in it is imported, so a function of that name would
    be replaced, or would hide `hetjax.devices.workers`. A class of its own is Python's way to let a module do more
    (Data model, "Customizing module attribute access").
    """

    def __call__(self, choice: str | int | None = None) -> list[jax.Device]:
        """Choose the devices to train on; on a CPU they are simulated. Call it before anything else uses JAX.

        A choice is a number of devices, or kinds: `gpu`, `cpu`, `tpu`, `gpu+cpu`, `cuda:0,2+cpu` (with indices from 0),
        `cpu:0-3` (the CPU split into four simulated devices), `all`. Beside another kind, `cpu` is one worker. Any
        platform that JAX knows can be named. XLA_FLAGS and JAX_NUM_CPU_DEVICES override the number of simulated
        devices. With several processes, all of them call this, each with its own choice.

        Args:
            choice: The choice. Default: that of the variable HETJAX_DEVICES, which `python -m hetjax launch --devices`
                sets for every process; else all GPUs or TPUs; else 4 simulated CPU devices, with several processes 1
                in each.

        Returns:
            The devices of this process; of all processes where one JAX backend spans them (transport 'mesh').

        Raises:
            ValueError: If the choice is invalid, or some process does not have such devices.
        """
        from hetjax.devices.chosen import chosen_devices

        return chosen_devices(choice)


sys.modules[__name__].__class__ = _CallablePackage
