"""The environment of a process: variables that a launcher sets, and packages that may be missing."""

from __future__ import annotations

import importlib
from typing import Any

COORDINATOR = "HETJAX_COORDINATOR"  # HOST:PORT at which processes reach process 0
BIND = "HETJAX_BIND"  # HOST:PORT that process 0 listens on
TRANSPORT = "HETJAX_TRANSPORT"  # how sums travel between processes: auto, mesh or host
DEVICES = "HETJAX_DEVICES"  # the devices of this process, such as gpu+cpu
KEY = "HETJAX_KEY"  # file with the key of the fleet
RENDEZVOUS = "HETJAX_RENDEZVOUS"  # HOST:PORT of the rendezvous of an elastic fleet
JOIN = "HETJAX_JOIN"  # set: this process enters an elastic run that is under way
HOLDERS = "HETJAX_HOLDERS"  # members that hold each slice of the optimizer's state: 1 or 2
CHILD = "HETJAX_CHILD"  # the launcher's name for this process, at the rendezvous
PROCESSES = "HETJAX_PROCESSES"  # number of processes
PROCESS = "HETJAX_PROCESS"  # index of this process, from 0
LOST = "HETJAX_LOST"  # original indices of lost processes, such as 0,2, in an elastic run; unset while all are alive
HEARTBEAT = "HETJAX_HEARTBEAT"  # folder of the heartbeats
PROGRAMS = "HETJAX_COMPILATION_CACHE_DIR"  # folder of compiled programs, see devices/compile.py
RESTART = "HETJAX_RESTART"  # number of restarts of the run; unset the first time
STARTED = "HETJAX_STARTED"  # start of the launcher, in seconds since 1970, where it added --resume


def optional_package(name: str, purpose: str, install: str) -> Any:
    """Import a package that hetjax does not require.

    Args:
        name: its module.
        purpose: what needs it, as the beginning of a sentence.
        install: what to type after `pip install`.

    Returns:
        The module.

    Raises:
        ImportError: if it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {name} ({error}): pip install {install}.") from error
