"""A small causal transformer language model with pre-norm blocks and a head tied to the embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.dropout import Dropout


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), dropout on both branches."""

    def __init__(self, width: int, heads: int, dropout: float, dtype: jnp.dtype, rngs: nnx.Rngs):
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
        query_key_value = self.query_key_value(self.norm1(x_TxD))
        q, k, v = query_key_value.reshape(tokens, 3, self.heads, width // self.heads).swapaxes(0, 1)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(tokens, width)
        x_TxD = x_TxD + self.dropout(self.project(attended), rngs)
        return x_TxD + self.dropout(self.down(jax.nn.gelu(self.up(self.norm2(x_TxD)))), rngs)


class Transformer(nnx.Module):
    """Logits [tokens, vocab] of the next token at every place of ONE sequence [tokens]; vmap it for a batch."""

    def __init__(
        self,
        window: int,
        vocab: int,
        *,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        dtype: jnp.dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if width % heads:
            raise ValueError(f"A width of {width} cannot be shared by {heads} heads: make it a multiple of them.")
        small = nnx.initializers.normal(0.02)
        self.window = window
        self.embedding = nnx.Embed(vocab, width, embedding_init=small, dtype=dtype, rngs=rngs)
        self.position = nnx.Param(small(rngs.params(), (window, width), jnp.float32))
        self.dropout = Dropout(dropout)
        self.blocks = nnx.List([Block(width, heads, dropout, dtype, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_T: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        if tokens_T.ndim != 1 or len(tokens_T) > self.window:
            raise ValueError(
                f"The transformer takes one sequence of at most {self.window} tokens, but got shape {tokens_T.shape}. "
                "Use jax.vmap for a batch, and a window as long as the source's."
            )
        x_TxD = self.embedding(tokens_T)
        x_TxD = self.dropout(x_TxD + self.position[: len(tokens_T)].astype(x_TxD.dtype), rngs)
        for block in self.blocks:
            x_TxD = block(x_TxD, rngs)
        return self.embedding.attend(self.norm(x_TxD)).astype(jnp.float32)
