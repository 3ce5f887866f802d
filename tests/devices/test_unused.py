"""A run is never on the CPU silently beside an accelerator: a sentence says why, and what to type."""

import logging

import jax
import pytest

import hetjax
from hetjax.devices import chosen, unused, workers

LIKE_COLAB = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.7.2", "jax-cuda12-pjrt": "0.7.2"}
WORKING = dict.fromkeys(LIKE_COLAB, "0.7.2")


def t4(root):
    folder = root / "proc/driver/nvidia/gpus/0000:00:04.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t Tesla T4\nIRQ: 33\n")


@pytest.mark.parametrize(
    ("installed", "platforms", "environment", "reason", "remedy"),
    [
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, None, {}, "plugin is not installed", '"jax[cuda12]==0.10.2"'),
        (LIKE_COLAB, None, {}, "jax-cuda12-plugin 0.7.2 is not the version of jaxlib, 0.10.2", '"jax[cuda12]==0.10.2"'),
        (WORKING, "cpu", {}, "JAX_PLATFORMS is 'cpu'", "unset JAX_PLATFORMS"),
        (WORKING, None, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is ''", "unset CUDA_VISIBLE_DEVICES"),
        (WORKING, "", {}, "could not start", "nvidia-smi"),
    ],
)
def test_an_unused_gpu_is_named_with_reason_and_remedy(tmp_path, installed, platforms, environment, reason, remedy):
    t4(tmp_path)
    sentence = unused.unused(["cpu"], installed, platforms, environment, tmp_path)
    assert sentence.startswith("This machine has Tesla T4, but JAX is on the CPU: ")
    assert reason in sentence
    assert remedy in sentence.partition("Type: ")[2]


def test_a_gpu_that_is_used_or_absent_gives_no_sentence(tmp_path):
    assert unused.unused(["cpu"], WORKING, None, {}, tmp_path) is None
    t4(tmp_path)
    assert unused.unused(["cuda", "cpu"], WORKING, None, {}, tmp_path) is None
    assert unused.unused(["cuda", "cpu"], WORKING, "cuda,cpu", {}, tmp_path) is None


def test_a_container_shows_a_gpu_and_a_host_shows_a_tpu(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert "NVIDIA GPU" in unused.unused(["cpu"], WORKING, None, {}, tmp_path)
    sentence = unused.unused(["cpu", "cuda"], WORKING, None, {"TPU_ACCELERATOR_TYPE": "v5litepod-1"}, tmp_path)
    assert "TPU v5litepod-1" in sentence
    assert sentence.endswith('Type: pip install "jax[tpu]==0.7.2"')


@pytest.fixture
def gpu(monkeypatch, caplog):
    """A machine whose GPU JAX does not use, and nothing said or chosen so far."""
    monkeypatch.setattr(unused, "unused", lambda *_: "This machine has Tesla T4, but ...")
    monkeypatch.setattr(unused, "_chosen", set())
    unused.warn_of_unused.cache_clear()
    with caplog.at_level(logging.WARNING, "hetjax"):
        yield
    unused.warn_of_unused.cache_clear()


@pytest.mark.parametrize(
    "all_of_them",
    [
        lambda: hetjax.devices(2),
        lambda: hetjax.devices("all"),
        lambda: None,
        lambda: jax.devices(),
        lambda: list(reversed(jax.devices())),
    ],
)
def test_devices_that_were_not_chosen_warn_once(all_of_them, gpu, caplog):
    for _ in range(2):
        workers.Workers.of(all_of_them())
    assert caplog.messages == ["This machine has Tesla T4, but ..."]


@pytest.mark.parametrize("choice", ["cpu", "cpu:0-7", "cpu:0-1"])
def test_the_cpu_chosen_by_name_gives_no_warning(choice, gpu, caplog, monkeypatch):
    workers.Workers.of(choice)
    workers.Workers.of(hetjax.devices(choice))
    workers.Workers.of(jax.devices()[:2])
    assert not caplog.messages
    monkeypatch.setenv("HETJAX_DEVICES", choice)
    workers.Workers.of(None)
    assert not caplog.messages


def test_a_chosen_gpu_that_jax_cannot_use_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(chosen, "unused_here", lambda: "This machine has Tesla T4, but JAX is on the CPU: a reason.")
    with pytest.raises(ValueError, match=r"no gpu that JAX can use here.* This machine has Tesla T4.* a reason\."):
        hetjax.devices("gpu+cpu")


def test_workers_say_their_backend():
    assert workers.Workers.of(jax.devices()).backend == f"JAX {jax.__version__}, backend cpu"
    kinds = ["gpu:Tesla T4", "gpu:Tesla T4", "cpu:cpu"]
    members = tuple(workers.Worker(0, kind[:3], kind, kind) for kind in kinds)
    assert workers.Workers(members, tuple(jax.devices()[:3])).backend == (
        f"JAX {jax.__version__}, backend gpu (Tesla T4) and cpu"
    )
