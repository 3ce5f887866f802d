"""Eight fake CPU devices for all tests, and quick compiles; must be said before JAX's first use."""

import os

_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("hetjax", deadline=None, print_blob=True)
hypothesis.settings.load_profile("hetjax")


@pytest.fixture
def float64():
    """Double precision for one test, in all threads."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
