"""Fake CPU devices: requested before JAX starts, and never more than the machine supports."""

import os
import subprocess
import sys

import pytest

from hetjax.devices.fake import devices_from_environment, fake_devices, most_fake_devices


def test_number_set_by_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_force_host_platform_device_count=5")
    assert devices_from_environment() == 5
    monkeypatch.delenv("XLA_FLAGS")
    assert devices_from_environment() is None
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "6")
    assert devices_from_environment() == 6


def test_no_more_devices_than_there_are():
    assert len(fake_devices()) == 8
    assert len(fake_devices(3)) == 3
    with pytest.raises(ValueError, match="9 devices were requested, but there are 8"):
        fake_devices(9)
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises((ValueError, TypeError), match=r"The number of devices is .* at least 1"):
            fake_devices(wrong)


def test_no_more_devices_than_memory_maps_allow(monkeypatch):
    with pytest.raises(ValueError, match=r"1,000 devices were requested, but this CPU .*max_map_count"):
        fake_devices(1000)
    assert 4 <= most_fake_devices() <= 256
    monkeypatch.setattr("hetjax.devices.fake.most_fake_devices", lambda: 7)
    assert len(fake_devices(7)) == 7
    with pytest.raises(ValueError, match="8 devices were requested, but this CPU can be split into at most 7"):
        fake_devices()


def test_a_fresh_process_gets_the_requested_number():
    """An explicit count, the default, and a count set by XLA_FLAGS; the three processes run concurrently."""
    started = []
    for flags, count, found in (("", "3", 3), ("", "", 4), ("2", "", 2)):
        flags = f"--xla_force_host_platform_device_count={flags}" if flags else ""
        code = f"from hetjax.devices.fake import fake_devices; assert len(fake_devices({count})) == {found}"
        started.append(subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": flags}))
    assert [process.wait(timeout=100) for process in started] == [0, 0, 0]
