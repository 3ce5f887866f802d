"""Losses of one example: what a model learns from, before any sum over a batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Score(NamedTuple):
    """One example's loss and number of right answers, both summed over its answers, and the weight of these."""

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array


def classification(logits_C: jax.Array, label: jax.Array) -> Score:
    """Cross-entropy -log softmax(logits)[label]; weight 1."""
    loss = -jax.nn.log_softmax(logits_C)[label]
    correct = (jnp.argmax(logits_C) == label).astype(loss.dtype)
    return Score(loss, jnp.ones_like(loss), correct)


def next_token(logits_TxV: jax.Array, targets_T: jax.Array, weights_T: jax.Array) -> Score:
    """Weighted sum over the places of a window of -log softmax(logits)[target]; the weight is sum(weights)."""
    loss_T = -jnp.take_along_axis(jax.nn.log_softmax(logits_TxV), targets_T[:, None], axis=-1)[:, 0]
    correct_T = (jnp.argmax(logits_TxV, axis=-1) == targets_T).astype(loss_T.dtype)
    return Score(jnp.sum(weights_T * loss_T), jnp.sum(weights_T), jnp.sum(weights_T * correct_T))
