"""A small causal transformer language model with pre-norm blocks and tied embeddings."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.adapters.nnx_versions import List
from hetjax.zoo.layers import ComputeDtype, Dropout, at_least_float32


def causal_attention(q_HxTxD: jax.Array, k_HxTxD: jax.Array, v_HxTxD: jax.Array) -> jax.Array:
    """Causal softmax(q k^T / sqrt(D)) v for each head.

    The softmax is taken in float32 or wider. jax.nn.dot_product_attention always uses float32, so that tests in float64
    could not tell whether two splits agree.
    """
    _, tokens, width = q_HxTxD.shape
    scores_HxTxT = at_least_float32(q_HxTxD @ k_HxTxD.swapaxes(1, 2)) / math.sqrt(width)
    visible_TxT = jnp.tri(tokens, dtype=bool)
    weights_HxTxT = jax.nn.softmax(jnp.where(visible_TxT, scores_HxTxT, -jnp.inf))
    return weights_HxTxT.astype(v_HxTxD.dtype) @ v_HxTxD


class TransformerBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches."""

    def __init__(self, width: int, heads: int, dropout: float, dtype: ComputeDtype, rngs: nnx.Rngs):
        linear = lambda a, b: nnx.Linear(a, b, dtype=dtype, rngs=rngs)
        self.heads = heads
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.query_key_value = linear(width, 3 * width)
        self.project = linear(width, width)
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)
        self.dropout = Dropout(dropout)

    def __call__(self, x_TxD: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        tokens, width = x_TxD.shape
        qkv = self.query_key_value(self.norm1(x_TxD)).reshape(tokens, 3, self.heads, width // self.heads)
        attended_HxTxD = causal_attention(*qkv.transpose(1, 2, 0, 3))
        attended = attended_HxTxD.swapaxes(0, 1).reshape(tokens, width)
        x_TxD = x_TxD + self.dropout(self.project(attended), rngs)
        return x_TxD + self.dropout(self.down(jax.nn.gelu(self.up(self.norm2(x_TxD)))), rngs)


class Transformer(nnx.Module):
    """Logits [tokens, vocab] of the next token for ONE sequence [tokens]; use jax.vmap for a batch.

    Args:
        window: Maximum number of tokens.
        vocab: Number of distinct tokens.
        width: Features of each token.
        depth: Number of blocks.
        heads: Attention heads of a block; they divide the width.
        dropout: Rate of dropout.
        dtype: dtype of the computation. Default: that of the parameters.
        rngs: Initialize the parameters.

    Raises:
        ValueError: If the heads do not divide the width.
    """

    def __init__(
        self,
        window: int,
        vocab: int,
        *,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        dtype: ComputeDtype = None,
        rngs: nnx.Rngs,
    ):
        if width % heads:
            raise ValueError(f"A width of {width} cannot be divided among {heads} heads: use a multiple of {heads}.")
        small = nnx.initializers.normal(0.02)
        self.window = window
        self.dtype = dtype
        self.embedding = nnx.Param(small(rngs.params(), (vocab, width), jnp.float32))
        self.position = nnx.Param(small(rngs.params(), (window, width), jnp.float32))
        self.dropout = Dropout(dropout)
        self.blocks = List([TransformerBlock(width, heads, dropout, dtype, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_T: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        if tokens_T.ndim != 1 or len(tokens_T) > self.window:
            raise ValueError(
                f"The transformer takes one sequence of at most {self.window} tokens, but got shape {tokens_T.shape}. "
                "Use jax.vmap for a batch, and a window as long as the source's."
            )
        embedding_VxD = self.embedding[...]
        x_TxD = embedding_VxD[tokens_T] + self.position[: len(tokens_T)]
        x_TxD = self.dropout(x_TxD.astype(self.dtype or x_TxD.dtype), rngs)
        for block in self.blocks:
            x_TxD = block(x_TxD, rngs)
        x_TxD = self.norm(x_TxD)
        return at_least_float32(x_TxD @ embedding_VxD.T.astype(x_TxD.dtype))
