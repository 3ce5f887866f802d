"""A tiny problem whose metrics encode the samples of every step, for tests that stop, kill and resume runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sample_log import log_samples, numbered

from hetjax import Chunked, Trainer

SAMPLES, BATCH = 150, 16  # ten steps an epoch, the last one short


def loss_fn(params, batch, keys):
    """A linear model with noise from the key of each sample."""
    noise_b = jax.vmap(jax.random.normal)(keys)
    return (batch["x"] @ params["w"] + params["b"] - batch["y"] + 0.1 * noise_b) ** 2


def source():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 5)).astype(np.float32)
    return numbered({"x": x, "y": (x.sum(1) + rng.normal(size=SAMPLES)).astype(np.float32)})


def trainer_for(devices, **options):
    """A trainer, its data and its initial state."""
    options = {
        "batch_size": BATCH,
        "controller": "equal",
        "engine": Chunked(rungs=[4, 16]),
        "ema_decay": 0.9,
        **options,
    }
    trainer = Trainer(log_samples(loss_fn, SAMPLES), optax.sgd(0.05, momentum=0.9), devices=devices, **options)
    return trainer, source(), trainer.init({"w": jnp.zeros(5), "b": jnp.zeros(())})
