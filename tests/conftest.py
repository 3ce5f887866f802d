"""Eight fake CPU devices for all tests, quick compiles and a store of them; must be said before JAX's first use."""

import contextlib
import gc
import os
import signal

import quick_compiles

_FLAGS = f"--xla_force_host_platform_device_count=8 {quick_compiles.FLAGS}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

# Tests that were started in the background, where a shell has SIGINT ignored, hand that on to all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from hetjax.environment import PROGRAMS  # noqa: E402

_STORE_LIMIT = 2**28  # bytes of compiled programs that are kept for the next tests

hypothesis.settings.register_profile("hetjax", deadline=None, print_blob=True)
hypothesis.settings.load_profile("hetjax")


def pytest_configure(config):
    """Share compiled programs between workers, programs that tests start, and the next tests, in pytest's own cache."""
    if PROGRAMS in os.environ or not hasattr(config, "cache"):
        return
    folder = config.cache.mkdir("programs")
    folder.chmod(0o700)
    os.environ[PROGRAMS] = str(folder)
    kept = 0
    with contextlib.suppress(FileNotFoundError):  # other tests run beside these, and tidy up too
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True):
            kept += entry.stat().st_size
            if kept > _STORE_LIMIT:
                entry.unlink()


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """A compiled CPU program takes some 150 memory maps, of which Linux gives a process 65,530."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def float64():
    """Double precision for one test, in all threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
