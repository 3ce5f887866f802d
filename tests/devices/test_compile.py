"""One compile per kind of device: programs are shared between devices and stored for other processes."""

import functools
import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax.devices import compile as compile_module
from hetjax.devices import memory
from hetjax.devices.compile import compile_for, compile_over, compiles
from hetjax.environment import PROGRAMS

VECTOR = jax.ShapeDtypeStruct((3,), np.float32)


@pytest.fixture(autouse=True)
def no_store(monkeypatch):
    """Disable the shared store of the test session."""
    monkeypatch.delenv(PROGRAMS, raising=False)
    monkeypatch.setattr(compile_module, "_store", functools.cache(compile_module._store.__wrapped__))


@pytest.fixture
def store(tmp_path, monkeypatch, no_store):
    """The directory of an empty store."""
    monkeypatch.setenv(PROGRAMS, str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def jax_cache(tmp_path):
    """JAX's persistent cache, enabled for every program."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    jax._src.compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    jax._src.compilation_cache.reset_cache()


def scaled(acc, x):
    return acc + 2 * x


def made(fn=scaled, devices=None, **options):
    """The programs of `fn` for some devices, and the number of compiles they took."""
    before = compiles()
    programs = compile_for(fn, (VECTOR, VECTOR), devices or jax.devices()[2:5], **options)
    return programs, compiles() - before


def answers(programs):
    return [np.asarray(program(np.ones(3, np.float32), np.full(3, 5, np.float32))).tolist() for program in programs]


def test_one_compile_serves_all_devices_of_a_kind():
    devices = jax.devices()[2:8]
    programs, count = made(devices=devices, donate=(0,))
    assert count == 1
    for device, program in zip(devices, programs, strict=True):
        acc = jax.device_put(jnp.ones(3), device)
        out = program(acc, np.full(3, device.id, np.float32))
        assert out.devices() == {device}
        assert acc.is_deleted()
        np.testing.assert_array_equal(out, 1 + 2 * device.id)


@pytest.mark.parametrize("name", ["_load", "_serialize"])
def test_where_sharing_fails_each_device_compiles_for_itself(name, monkeypatch):
    monkeypatch.setattr(compile_module, name, lambda *_: 1 / 0)
    programs, count = made()
    assert count == 3
    assert answers(programs) == [[11, 11, 11]] * 3


def test_programs_from_the_jax_cache_run(jax_cache):
    """They cannot be serialized again: a copy would fail when run, both on a hit on disk and on one in memory."""
    made()
    jax.clear_caches()
    for _ in range(2):
        programs, _ = made()
        assert answers(programs) == [[11, 11, 11]] * 3


def test_a_stored_program_is_not_compiled_again(store):
    first, compiled = made(donate=(0,))
    again, none = made(donate=(0,), devices=jax.devices()[5:7])
    assert (compiled, none) == (1, 0)
    assert answers(again) == answers(first)[:2]
    assert memory.needed(again[0]) == memory.needed(first[0])
    acc = jax.device_put(jnp.ones(3), jax.devices()[5])
    assert again[0](acc, np.ones(3, np.float32)).devices() == {jax.devices()[5]}
    assert acc.is_deleted()


def test_a_program_over_a_mesh_is_stored_too(store):
    devices = jax.devices()[1:4]
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    total = lambda held, x_1: (held + jax.lax.psum(x_1[0], "data"), x_1)
    shared = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")), check_vma=False)
    x = jax.device_put(np.arange(3, dtype=np.float32), NamedSharding(mesh, P("data")))
    for compiled in (1, 0):
        held = jax.device_put(jnp.float32(1), NamedSharding(mesh, P()))
        before = compiles()
        program = compile_over(shared, (held, x), devices, donate=(0,))
        assert compiles() - before == compiled
        out, same = program(held, x)
        assert (float(out), out.sharding, same.sharding) == (4, NamedSharding(mesh, P()), x.sharding)
        assert held.is_deleted()


def test_unused_arguments_are_part_of_the_key(store):
    """Two functions that each use one of two arguments have the same text if unused arguments are dropped."""
    (first,), _ = made(lambda a, b: a * 2, devices=jax.devices()[:1])
    (second,), _ = made(lambda a, b: b * 2, devices=jax.devices()[:1])
    assert answers([first, second]) == [[2, 2, 2], [10, 10, 10]]


@pytest.mark.parametrize(
    "spoil",
    [lambda entry: entry.write_bytes(entry.read_bytes()[:-9]), lambda entry: entry.write_bytes(b"?" * 2000)],
    ids=["truncated", "garbled"],
)
def test_a_damaged_entry_is_compiled_again(store, spoil):
    made()
    (entry,) = store.iterdir()
    spoil(entry)
    programs, count = made()
    assert (count, answers(programs)) == (1, [[11, 11, 11]] * 3)
    assert made()[1] == 0


def test_an_entry_that_is_no_program_is_compiled_again(store):
    """Its digest is valid, but another version of JAX wrote another format."""
    made()
    (entry,) = store.iterdir()
    compile_module._store(str(store)).write(entry.name, b"another format")
    programs, count = made()
    assert (count, answers(programs)) == (1, [[11, 11, 11]] * 3)


def test_a_store_writable_by_others_is_not_used(store, caplog):
    store.mkdir(mode=0o700)
    store.chmod(0o777)
    with caplog.at_level(logging.WARNING, "hetjax"):
        assert [made()[1], made()[1]] == [1, 1]
    assert caplog.text.count("can be written by others") == 1
    assert not list(store.iterdir())


def test_a_callback_into_this_process_is_not_stored(store):
    for factor in (2, 3):
        triple = lambda a, b, factor=factor: jax.pure_callback(lambda x: np.asarray(x) * factor, a, b)
        assert answers(made(triple)[0]) == [[5 * factor] * 3] * 3
    assert not list(store.iterdir())


def test_all_dependencies_of_a_program_are_in_its_key(store, monkeypatch, request):
    made()
    for attribute, value in (("__version__", "0.0.1"), ("_host", lambda: "another machine")):
        owner = jax if attribute == "__version__" else compile_module
        with monkeypatch.context() as patched:
            patched.setattr(owner, attribute, value)
            assert made()[1] == 1
    assert made(donate=(0,))[1] == 1
    assert made(lambda a, b: a + 3 * b)[1] == 1
    assert made()[1] == 0
    request.getfixturevalue("float64")
    assert made()[1] == 1


@pytest.mark.slow
def test_another_process_loads_it_unless_its_xla_flags_differ(store):
    """Compared by the flags as XLA parsed them: the environment may have changed since."""
    made()
    code = "import test_compile; print(test_compile.made()[1])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = {
        **environment,
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("optimization_level=0", "optimization_level=1"),
    }
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=each, stdout=subprocess.PIPE, text=True)
        for each in (environment, other)
    ]
    assert [int(process.communicate(timeout=280)[0]) for process in started] == [0, 1]


def test_the_store_takes_precedence_over_the_jax_cache(store, jax_cache):
    made()
    jax.clear_caches()
    programs, count = made()
    assert (count, answers(programs)) == (0, [[11, 11, 11]] * 3)
