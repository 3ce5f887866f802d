"""Test settings: eight simulated CPU devices, fast compiles and a shared store of compiled programs."""

import contextlib
import gc
import os
import signal
from pathlib import Path

import quick_compiles

# XLA reads its flags once, when JAX starts.
_FLAGS = f"--xla_force_host_platform_device_count=8 {quick_compiles.FLAGS}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

# A shell starts background jobs with SIGINT ignored, which child processes would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from hetjax.engines.ladder import Ladder  # noqa: E402
from hetjax.environment import PROGRAMS  # noqa: E402

_STORE_LIMIT = 2**28  # bytes of compiled programs kept for later test runs
_MAPS_LIMIT = 15_000  # leaves 50,000 for the programs of the largest module

hypothesis.settings.register_profile("hetjax", deadline=None, print_blob=True, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("hetjax")


def pytest_configure(config):
    """Share compiled programs between xdist workers, subprocesses and later runs, in pytest's cache directory."""
    if PROGRAMS in os.environ or not hasattr(config, "cache"):
        return
    folder = config.cache.mkdir("programs")
    folder.chmod(0o700)
    os.environ[PROGRAMS] = str(folder)
    kept = 0
    with contextlib.suppress(FileNotFoundError):  # another test run may remove entries at the same time
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True):
            kept += entry.stat().st_size
            if kept > _STORE_LIMIT:
                entry.unlink()


@pytest.fixture(autouse=True, scope="module")
def prices_by_rows(request):
    """Price microbatches by rows, unless a module has MEASURED_PRICES.

    Measured prices decide how a count is split into microbatches, and with that the last bits of a run: two runs differ
    with the load of the machine. Programs that tests start measure as users' programs do.
    """
    if getattr(request.module, "MEASURED_PRICES", False):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ladder, "_prices", lambda ladder, rungs: ({rung: 1.0 + rung for rung in rungs}, 0.0))
        yield


@pytest.fixture(autouse=True, scope="module")
def bounded_memory_maps():
    """Drop compiled programs before a process runs out of memory maps.

    A compiled CPU program takes about 150 maps, and Linux allows 65,530 per process. Clearing JAX's caches takes up to
    0.6 s, so it is done only after modules that leave many maps behind.
    """
    yield
    if _memory_maps() > _MAPS_LIMIT:
        jax.clear_caches()
        gc.collect()


def _memory_maps() -> int:
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except FileNotFoundError:  # not Linux: no such limit
        return 0


@pytest.fixture
def float64():
    """Enable double precision for one test, in all threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
