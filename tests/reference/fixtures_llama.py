"""Slow, obvious references for what the fixtures record, in float64 numpy."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Each vector over its root mean square, times the weight."""
    out: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return out


def log_softmax(x: Array) -> Array:
    """Over the last axis."""
    shifted = x - x.max(-1, keepdims=True)
    out: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out


def rotate(vector: Array, position: int, theta: float) -> Array:
    """One head's query or key at one position, its halves paired."""
    half = len(vector) // 2
    out = np.empty_like(vector)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attention(
    x: Array, weights: Mapping[str, Array], prefix: str, heads: int, theta: float
) -> Array:
    """Causal attention of one row [S,H], one query at a time."""
    S, H = x.shape
    d = H // heads
    q, k, v = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    out = np.zeros_like(x)
    for head in range(heads):
        part = slice(head * d, (head + 1) * d)
        queries = [rotate(q[t, part], t, theta) for t in range(S)]
        keys = [rotate(k[t, part], t, theta) for t in range(S)]
        for t in range(S):
            scores = np.array([queries[t] @ keys[u] for u in range(t + 1)]) / np.sqrt(d)
            out[t, part] = np.exp(log_softmax(scores)) @ v[: t + 1, part]
    return out @ weights[f"{prefix}.o_proj.weight"].T


def hidden_before_norm(
    ids: npt.NDArray[np.int64],
    weights: Mapping[str, Array],
    *,
    layers: int,
    heads: int,
    eps: float,
    theta: float,
) -> Array:
    """The last layer's output [S,H] for one row of ids."""
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(layers):
        name = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        x = x + attention(normed, weights, f"{name}.self_attn", heads, theta)
        normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        gate = normed @ weights[f"{name}.mlp.gate_proj.weight"].T
        up = normed @ weights[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    return x


def draft_targets(
    ids: npt.NDArray[np.int64],
    weight: npt.NDArray[np.float32],
    vocab_size: int,
    draft_vocab_size: int,
) -> tuple[list[int], list[int]]:
    """The targets of the most trained ids, ascending, and the count of every id.

    Takes the id with the most trained tokens, the lower one of a tie, again and again.
    """
    counts = [0] * vocab_size
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            if weight[b, t] > 0:
                counts[int(ids[b, t])] += 1
    left = list(range(vocab_size))
    chosen = []
    for _ in range(draft_vocab_size):
        best = left[0]
        for token in left:
            if counts[token] > counts[best]:
                best = token
        chosen.append(best)
        left.remove(best)
    return sorted(chosen), counts
