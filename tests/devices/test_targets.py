"""Targets: data files that describe accelerators which are not there."""

import jax
import pytest

from hetjax.devices import memory, targets
from hetjax.devices.targets import names, target, target_of


@pytest.mark.parametrize("name", names())
def test_every_target_that_comes_with_hetjax_can_be_read_and_names_its_source(name):
    found = target(name)
    assert found.source
    assert found.memory > 2**33
    assert found.platform in ("cuda", "tpu")


def test_a_tpu_takes_a_topology_of_its_own_and_names_ignore_case():
    assert target("V5E:2x4").topology == "v5e:2x4"
    assert target("v5e").topology == "v5e:2x2"
    assert target("t4:2").topology == "1x1x2"
    with pytest.raises(ValueError, match="only TPUs have"):
        target("T4:2x2")


@pytest.mark.parametrize(("name", "meant"), [("T44", "T4"), ("A10", "A100"), ("v5:2x2", "v5e")])
def test_an_unknown_target_is_answered_with_the_list_and_what_was_meant(name, meant):
    with pytest.raises(ValueError, match=f"Did you mean {meant}.*A100, H100, T4, v4, v5e, v6e"):
        target(name)


def test_a_file_of_the_user_describes_a_target(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((targets.FILES / "T4.toml").read_text().replace("Tesla T4", "Tesla T5"))
    assert target(str(path)).device == "Tesla T5"
    with pytest.raises(FileNotFoundError):
        target(str(tmp_path / "missing.toml"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("source =", "origin ="), "'origin' is unknown"),
        (("memory = 15634661376", 'memory = "16 GB"'), "'memory' is unknown or of the wrong type"),
        (('source = "NVIDIA', '# "NVIDIA'), "'source' is missing"),
        (('"cuda"', '"metal"'), "expected platform 'cuda' with a table"),
        (("[gpu]", "[gpu"), "is not a TOML file"),
    ],
)
def test_a_file_that_is_not_a_target_is_refused_with_what_is_wrong(tmp_path, change, problem):
    path = tmp_path / "mine.toml"
    path.write_text((targets.FILES / "T4.toml").read_text().replace(*change))
    with pytest.raises(ValueError, match=problem):
        target(str(path))


def test_the_description_of_a_gpu_has_its_own_limits_and_the_common_ones():
    text = target("T4")._description()
    for part in (
        "core_count: 40",
        "cuda_compute_capability { major: 7 minor: 5 }",
        "threads_per_warp: 32",
        "device_memory_size: 15634661376",
        "device_description_str: 'Tesla T4'",
    ):
        assert part in text


def test_a_missing_compiler_is_answered_with_what_to_install(monkeypatch):
    def missing(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", missing)
    with pytest.raises(ImportError, match=r"pip install 'hetjax\[cuda\]'.*jax\[cuda12\]"):
        target("T4").devices()


def test_another_refusal_of_the_compiler_is_passed_on(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("INVALID_ARGUMENT: no such topology\nmore")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", refused)
    with pytest.raises(ValueError, match=r"refuses v5e:9x9: INVALID_ARGUMENT: no such topology Check the target"):
        target("v5e:9x9").devices()


def test_slow_operations_are_counted_in_the_text_of_a_program():
    assert target("v5e").slow_operations("a = (f32[8]{0}, u32[]) send(b, c), is_host_transfer=true")
    text = "a = f32[8]{0} select-and-scatter(b, c, d)\n e = bf16[8]{0} add(f, g)\n"
    found = target("T4").slow_operations(text)
    assert sorted(found.values()) == [1, 1]
    assert any("bfloat16 is emulated" in why for why in found)
    assert len(target("A100").slow_operations(text)) == 1
    assert not target("A100").slow_operations("x = f32[8]{0} add(y, z)")


def test_the_memory_of_a_target_is_that_of_its_file(monkeypatch):
    device = jax.devices()[0]
    assert target_of(device) is None
    monkeypatch.setitem(targets._targets, device, target("T4"))
    assert memory.available(device) == int(15634661376 * memory.SAFE_SHARE)
