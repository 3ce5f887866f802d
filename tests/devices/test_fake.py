"""Devices: fake ones are asked for before JAX starts, and never more than there are."""

import os
import subprocess
import sys

import pytest

from hetjax.devices.fake import fake_devices, most_fake_devices, said_by_environment


def test_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_force_host_platform_device_count=5")
    assert said_by_environment() == 5
    monkeypatch.delenv("XLA_FLAGS")
    assert said_by_environment() is None
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "6")
    assert said_by_environment() == 6


def test_no_more_devices_than_there_are():
    assert len(fake_devices()) == 8
    assert len(fake_devices(3)) == 3
    with pytest.raises(ValueError, match="9 devices were asked for, but there are 8"):
        fake_devices(9)
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises((ValueError, TypeError), match=r"The number of devices is .* at least 1"):
            fake_devices(wrong)


def test_a_cpu_is_not_split_into_more_devices_than_it_has_memory_maps_for(monkeypatch):
    with pytest.raises(ValueError, match=r"1,000 devices were asked for, but a CPU can be split into .*max_map_count"):
        fake_devices(1000)
    assert 4 <= most_fake_devices() <= 256
    monkeypatch.setattr("hetjax.devices.fake.most_fake_devices", lambda: 7)
    assert len(fake_devices(7)) == 7
    with pytest.raises(ValueError, match="8 devices were asked for, but a CPU can be split into 7"):
        fake_devices()


@pytest.mark.parametrize(("flags", "count", "found"), [("", "3", 3), ("", "", 4), ("2", "", 2)])
def test_a_fresh_process_gets_what_it_asks_for(flags, count, found):
    said = f"--xla_force_host_platform_device_count={flags}" if flags else ""
    code = f"from hetjax.devices.fake import fake_devices; assert len(fake_devices({count})) == {found}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env={**os.environ, "XLA_FLAGS": said})
