"""The choice of devices: by number, kind and index; simulated ones on a CPU; two PJRT clients as CPU + GPU."""

import os
import subprocess
import sys

import jax
import pytest
from fake_link import act_as

import hetjax
import hetjax.devices.workers
from hetjax import processes
from hetjax.devices.accelerators import accelerators, expected_kinds
from hetjax.devices.choice import Selection, parse
from hetjax.devices.chosen import chosen_devices
from hetjax.devices.fake import devices_from_environment, most_fake_devices
from hetjax.devices.workers import Workers

# -- the grammar --


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, None),
        (3, 3),
        (" 3 ", 3),
        ("gpu", (Selection("gpu"),)),
        ("GPU + cpu", (Selection("gpu"), Selection("cpu"))),
        ("cuda:0,2+cpu", (Selection("cuda", (0, 2)), Selection("cpu"))),
        ("cpu:0-2,5", (Selection("cpu", (0, 1, 2, 5)),)),
        ("all", (Selection("all"),)),
        ("my_plugin2:1", (Selection("my_plugin2", (1,)),)),
    ],
)
def test_choices(text, found):
    assert parse(text, {}) == found
    if isinstance(found, tuple):
        assert parse("+".join(map(str, found)), {}) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "devices is empty: expected a number, all, or kinds"),
        ("  ", "devices is empty"),
        ("gpu+", "'gpu\\+', in which a kind is missing beside \\+"),
        ("+cpu", "a kind is missing"),
        ("2+cpu", "a number stands alone"),
        ("gpu gpu", "'gpu gpu' is no kind of device"),
        ("gpu,cpu", "'gpu,cpu' is no kind of device"),
        ("gpu:", "'' is no index; expected numbers from 0, such as gpu:0,2"),
        ("gpu:0,", "'' is no index"),
        ("gpu:x", "'gpu:x' is no kind"),
        ("gpu:-1", "'-1' is no index"),
        ("gpu:3-1", "'3-1' is no index"),
        ("cpu:0-99999", "'0-99999' is no index"),
        ("gpu:1,0-1", "lists a device twice"),
        ("cpu+gpu+cpu", "names cpu twice"),
        ("all+cpu", "all already means every device"),
        ("all:0", "all takes no indices"),
        ("0", "The number of devices is 0: expected a whole number of at least 1"),
        ("-2", "The number of devices is -2"),
        (True, "The number of devices is True"),
        (1.5, "The number of devices is 1.5"),
        ("\x00;rm", "is no kind of device"),
    ],
)
def test_what_is_no_choice_is_reported(text, message):
    with pytest.raises((ValueError, TypeError), match=message):
        parse(text)
    with pytest.raises((ValueError, TypeError), match=message):
        hetjax.devices(text)


def test_the_launcher_can_choose(monkeypatch):
    monkeypatch.setenv("HETJAX_DEVICES", "cpu:1,3")
    assert [device.id for device in hetjax.devices()] == [1, 3]
    assert len(hetjax.devices(2)) == 2
    assert [worker.name for worker in Workers.of(None).members] == [str(d) for d in jax.devices()[1:4:2]]


# -- devices of this process; the tests run with eight on the CPU --


def test_the_package_is_a_function_too():
    assert hetjax.devices.workers.Workers is Workers
    assert hetjax.devices(2) == chosen_devices(2) == jax.devices()[:2]


def test_devices_by_number_kind_and_index():
    assert hetjax.devices() == hetjax.devices("cpu") == hetjax.devices("all") == jax.devices()
    assert hetjax.devices("cpu:2,0") == [jax.devices()[2], jax.devices()[0]]
    assert list(Workers.of("cpu:4-6").own) == jax.devices()[4:7]
    assert list(Workers.of(3).own) == jax.devices()[:3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", r"There is no gpu that JAX can use here: it has cpu \(8 devices\)\. Choose one of these, or install"),
        ("tpu+cpu", "There is no tpu"),
        ("nonsense", "There is no nonsense"),
        ("cpu:8", r"There is no cpu:8 here: there are 8 of kind cpu \(set by XLA_FLAGS or JAX_NUM_CPU_DEVICES\)"),
        ("cpu:0-999", "1,000 devices were requested, but this CPU"),
        ("9", "9 devices were requested, but there are 8"),
    ],
)
def test_devices_that_are_not_here_are_reported(text, message):
    with pytest.raises(ValueError, match=message):
        hetjax.devices(text)


def test_number_set_by_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3 --xla_force_host_platform_device_count=5")
    assert devices_from_environment() == 5
    monkeypatch.delenv("XLA_FLAGS")
    assert devices_from_environment() is None
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "6")
    assert devices_from_environment() == 6


def test_no_more_devices_than_memory_maps_allow(monkeypatch):
    with pytest.raises(ValueError, match=r"1,000 devices were requested, but this CPU .*max_map_count"):
        hetjax.devices(1000)
    assert 4 <= most_fake_devices() <= 256
    monkeypatch.setattr("hetjax.devices.fake.most_fake_devices", lambda: 7)
    assert len(hetjax.devices(7)) == 7
    with pytest.raises(ValueError, match="8 devices were requested, but this CPU can be split into at most 7"):
        hetjax.devices()


TWO_CLIENTS = """
from jax._src import xla_bridge
from jax._src.lib import xla_client
make = lambda: xla_client.make_cpu_client(asynchronous=True)
xla_bridge.register_backend_factory("second", make, priority=-100, fail_quietly=False)
"""


def test_fresh_processes_get_what_they_choose():
    """Simulated devices by number, by default and by XLA_FLAGS; two platforms at once. All run concurrently."""
    cases = [
        ("", "3", ["cpu"] * 3),
        ("", "", ["cpu"] * 4),
        ("", "'cpu:0-1'", ["cpu"] * 2),
        ("--xla_force_host_platform_device_count=2", "", ["cpu"] * 2),
        ("", "'second+cpu'", ["second", "cpu"]),
        ("", "'all'", ["second", "cpu"]),
        ("", "'second:0+cpu:0-2'", ["second", "cpu", "cpu", "cpu"]),
    ]
    started = []
    for flags, choice, found in cases:
        code = f"{TWO_CLIENTS}\nimport hetjax\nfound = hetjax.devices({choice})\n"
        code += "from jax.extend.backend import backends\nnames = {c: n for n, c in backends().items()}\n"
        code += f"assert [names[d.client] for d in found] == {found}, found\n"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": ""}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=environment))
    assert [process.wait(timeout=280) for process in started] == [0] * len(cases)


# -- several processes --


def test_what_one_process_cannot_have_is_an_error_in_all(monkeypatch):
    problem = "There is no gpu that JAX can use here."
    act_as(monkeypatch, 0, gathered=lambda own: [own, [problem, []]])
    for choose in (hetjax.devices, Workers.of):
        with pytest.raises(ValueError, match=r"Process 1: There is no gpu that JAX can use here\."):
            choose("cpu:0")
    act_as(monkeypatch, 1, gathered=lambda own: [[None, [0]], own])
    for choose in (hetjax.devices, Workers.of):
        with pytest.raises(ValueError, match="Process 1: There is no gpu that JAX can use here: it has cpu"):
            choose("gpu")


def test_a_process_without_worker_is_an_error_in_all(monkeypatch):
    act_as(monkeypatch, 0, gathered=lambda own: [own, [None, []]])
    with pytest.raises(ValueError, match="Process 1 of 2 has no worker"):
        Workers.of(jax.devices()[:1])


def test_a_process_without_worker_of_a_mesh_is_an_error_in_all(monkeypatch):
    """The same list in both processes, with devices of process 0 only."""
    for process in range(2):
        act_as(monkeypatch, process, gathered=lambda own: [True, False])
        monkeypatch.setattr(processes, "by_host", lambda: False)
        with pytest.raises(ValueError, match="Process 1 of 2 has no worker"):
            Workers.of(jax.devices()[:1])


def test_one_device_each_with_several_processes(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    act_as(monkeypatch, 0, gathered=lambda own: [own, own])
    assert len(hetjax.devices("cpu")) == 1


# -- kinds, before JAX starts --


def test_kinds_are_found_by_the_files_of_drivers(tmp_path):
    for k, model in enumerate(["Tesla T4", "NVIDIA A100"]):
        file = tmp_path / "proc/driver/nvidia/gpus" / f"0000:0{k}" / "information"
        file.parent.mkdir(parents=True)
        file.write_text(f"Model: \t\t {model}\nIRQ: 7\n")
    kinds = lambda choice, **environment: expected_kinds(choice, environment, tmp_path)
    assert accelerators({}, tmp_path) == {"cuda": ["Tesla T4", "NVIDIA A100"]}
    assert kinds(None) == kinds("2") == kinds("gpu") == ["NVIDIA A100", "Tesla T4"]
    assert kinds("cuda:1+cpu") == ["NVIDIA A100", "cpu"]
    assert kinds("all") == ["NVIDIA A100", "Tesla T4", "cpu"]
    assert kinds("cpu:0-3") == kinds(None, JAX_PLATFORMS="cpu") == ["cpu"]
    assert kinds(None, CUDA_VISIBLE_DEVICES="1") == ["NVIDIA A100"]
    assert kinds(None, HETJAX_DEVICES="cpu") == ["cpu"]
    assert kinds("second+cpu") == ["cpu", "second"]
    for choice in (None, "all", 2):
        assert expected_kinds(choice, {}, tmp_path / "empty") == ["cpu"]
