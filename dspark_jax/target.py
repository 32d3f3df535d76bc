"""The frozen decoder-only target: logits, feature taps, cached forward, for every family of `TargetConfig`."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax import kv_cache, layers, rotary
from dspark_jax.attention import Rule
from dspark_jax.config import ConfigError, LayerShape, TargetConfig
from dspark_jax.gemma import GemmaBlock
from dspark_jax.kv_cache import Cache, LayerCache

Params = dict[str, Any]
_ones = nn.initializers.ones


class TargetOutput(NamedTuple):
    """`hidden` is after the final norm; tap m is the raw output of layer tap_layers[m] (-1: the embedding)."""

    logits_BSV: jax.Array
    hidden_BSD: jax.Array
    taps_BSMD: jax.Array


class Features(NamedTuple):
    """What a forward pass computes before the head."""

    hidden_BSD: jax.Array
    taps_BSMD: jax.Array
    caches: list[Cache]  # as given, with the new rows; empty where none were given


class Block(nn.Module):
    """One decoder layer: grouped-query attention with rotary positions, then a gated MLP, both pre-norm. Llama,
    Mistral, Qwen2 (a bias on q, k and v) and Qwen3 (norms of q and k)."""

    config: TargetConfig
    shape: LayerShape

    @nn.compact
    def __call__(self, x_BSD: jax.Array, position_BS: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        c, shape = self.config, self.shape
        group = c.num_heads // c.num_kv_heads
        # One weight for q, k and v, grouped by key/value head: one dot, and a tensor-parallel split is by whole groups.
        qkv = self.param("qkv", layers.normal_init, (c.num_kv_heads, group + 2, c.head_dim, c.d_model))
        o = self.param("o", layers.normal_init, (c.d_model, c.num_heads, c.head_dim))
        gate = self.param("gate", layers.normal_init, (c.d_ff, c.d_model))
        up = self.param("up", layers.normal_init, (c.d_ff, c.d_model))
        down = self.param("down", layers.normal_init, (c.d_model, c.d_ff))

        normed_BSD = layers.rms_norm(x_BSD, self.param("attn_norm", _ones, (c.d_model,)), c.norm_eps)
        qkv_BSKJH = layers.linear(normed_BSD, qkv)
        if c.qkv_bias:
            bias_KJH = self.param("qkv_bias", nn.initializers.zeros, qkv.shape[:-1])
            qkv_BSKJH += bias_KJH[None, None].astype(jnp.float32)
        q_BSNH = qkv_BSKJH[..., :group, :].reshape(*x_BSD.shape[:2], c.num_heads, c.head_dim)
        k_BSKH, v_BSKH = qkv_BSKJH[..., group, :], qkv_BSKJH[..., group + 1, :]
        if c.qk_norm:
            q_BSNH = layers.rms_norm(q_BSNH, self.param("q_norm", _ones, (c.head_dim,)), c.norm_eps)
            k_BSKH = layers.rms_norm(k_BSKH, self.param("k_norm", _ones, (c.head_dim,)), c.norm_eps)
        table = rotary.table(position_BS, c.head_dim, shape.rope_theta, shape.rope_scaling)
        q_BSNH, k_BSKH = layers.rotate(q_BSNH, table), layers.rotate(k_BSKH, table)
        if cache is None:
            context = kv_cache.from_rows(k_BSKH, v_BSKH, kv_cache.compute_dtype(qkv.dtype))
        else:
            context = cache = cache.append(k_BSKH, v_BSKH, position_BS)
        out_BSNH = context.attend(q_BSNH, position_BS, Rule(c.attention_scale or None, window=shape.window))
        x_BSD = x_BSD + layers.linear(out_BSNH.reshape(*x_BSD.shape[:2], -1), o.reshape(c.d_model, -1))

        normed_BSD = layers.rms_norm(x_BSD, self.param("mlp_norm", _ones, (c.d_model,)), c.norm_eps)
        return x_BSD + layers.gated_mlp(normed_BSD, gate, up, down), cache


class TargetModel(nn.Module):
    """Token ids to hidden states. The residual stream is float32; dots run in the dtype of the weights."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self,
        tokens_BS: jax.Array,
        position_BS: jax.Array,
        caches: Sequence[Cache] | None = None,
        tap_layers: tuple[int, ...] = (),
    ) -> Features:
        c = self.config
        table_VD = self.param("embed", layers.normal_init, (c.vocab_size, c.d_model))
        if not c.tied_head:
            self.param("head", layers.normal_init, (c.vocab_size, c.d_model))
        x_BSD = layers.scaled_embedding(table_VD, tokens_BS, c.embed_scale)
        tapped = {-1: x_BSD}
        new_caches: list[Cache] = []
        block = nn.jit(GemmaBlock if c.gemma else Block)  # layers alike are traced and lowered once
        for i in range(c.num_layers):
            x_BSD, cache = block(c, c.layer(i), name=f"layers_{i}")(
                x_BSD, position_BS, None if caches is None else caches[i]
            )
            tapped[i] = x_BSD
            if cache is not None:
                new_caches.append(cache)
        hidden_BSD = layers.rms_norm(x_BSD, self.param("final_norm", _ones, (c.d_model,)), c.norm_eps)
        taps = [tapped[layer] for layer in tap_layers]
        taps_BSMD = jnp.stack(taps, axis=2) if taps else jnp.zeros((*x_BSD.shape[:2], 0, c.d_model), jnp.float32)
        return Features(hidden_BSD, taps_BSMD, new_caches)


def features(
    config: TargetConfig,
    params: Params,
    tokens_BS: jax.Array,
    position_BS: jax.Array | None = None,
    caches: Sequence[Cache] | None = None,
    tap_layers: tuple[int, ...] = (),
) -> Features:
    """The forward pass before the head; training, calibration, profiling and serving all call this one.

    Without caches the S tokens attend to each other; with caches they are appended at `position_BS` first and
    attend to everything at or before their own position.
    """
    if position_BS is None:
        position_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1])[None, :], tokens_BS.shape)
    model = TargetModel(config)
    return model.apply({"params": params}, tokens_BS, position_BS, caches, tap_layers)  # type: ignore[return-value]


def head_table(params: Params) -> jax.Array:
    """The head [V, D]: its own, or the embedding where they are tied."""
    return params.get("head", params["embed"])


def logits(params: Params, hidden: jax.Array, softcap: float = 0.0) -> jax.Array:
    """Float32 logits [..., V] of post-norm hidden states [..., D]; `softcap` is the config's `logit_softcap`."""
    return layers.soft_cap(layers.linear(hidden, head_table(params)), softcap)


def init_caches(config: TargetConfig, batch: int, length: int, dtype: jnp.dtype) -> list[LayerCache]:
    """Empty caches for weights of `dtype`."""
    dtype = kv_cache.compute_dtype(dtype)
    shapes = [config.layer(i) for i in range(config.num_layers)]
    return [kv_cache.empty(batch, shape.num_kv_heads, length, shape.head_dim, dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("config", "tap_layers"))
def _forward(config: TargetConfig, params: Params, tokens_BS: jax.Array, tap_layers: tuple[int, ...]) -> TargetOutput:
    hidden_BSD, taps_BSMD, _ = features(config, params, tokens_BS, tap_layers=tap_layers)
    return TargetOutput(logits(params, hidden_BSD, config.logit_softcap), hidden_BSD, taps_BSMD)


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target: its shape, its weights (a plain nested dict), and its tokenizer where the files bring one."""

    config: TargetConfig
    params: Params
    tokenizer: Any = None

    @property
    def dtype(self) -> jnp.dtype:
        return self.params["embed"].dtype

    def forward(self, tokens_BS: jax.Array, tap_layers: tuple[int, ...] = ()) -> TargetOutput:
        """Full causal forward of right-padded token rows [B, S]; see TargetOutput. Raises ConfigError on bad ids."""
        tokens = np.asarray(tokens_BS, np.int32)
        if tokens.ndim != 2:
            raise ConfigError(f"tokens have shape {tokens.shape}: expected two axes, [batch, sequence]")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.config.vocab_size:
            ids = f"token ids run from {tokens.min()} to {tokens.max()}"
            raise ConfigError(f"{ids}: the vocabulary is 0..{self.config.vocab_size - 1}")
        for layer in tap_layers:
            if not -1 <= layer < self.config.num_layers:
                raise ConfigError(f"tap layer {layer}: this target has layers -1..{self.config.num_layers - 1}")
        return _forward(self.config, self.params, jnp.asarray(tokens), tuple(tap_layers))


def load_target(path: str | Path, dtype: str = "float32", mesh: Mesh | None = None) -> Target:
    """Loads a target from a Hugging Face safetensors directory or Hub id (`org/name`, `org/name@revision`), a .gguf
    file, or the name "smollm2-135m".

    `dtype` (float32 or bfloat16) is the compute dtype: weights and caches are held in it, softmax, norms, residual
    stream and logits stay float32. With `mesh`, weights go straight into the shardings of sharding.py, and each
    process reads only what its own devices hold. Raises ConfigError naming the file or tensor that cannot be used.
    """
    from dspark_jax.weights.locate import read_target
    from dspark_jax.weights.tree import Placement

    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype = {dtype!r}: expected 'float32' or 'bfloat16'")
    return Target(*read_target(path, Placement(dtype, mesh)))


def cast_params(params: Params, dtype: str) -> Params:
    """Matrices in the compute dtype, norm scales (vectors) in float32."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype if np.ndim(x) > 1 else "float32"), params)
