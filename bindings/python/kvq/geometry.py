"""Geometry of a model's attention layers."""

from typing import NamedTuple

from . import capi
from ._arrays import LAYOUTS, choice


class Layer(NamedTuple):
    """Geometry of one layer.

    kv_heads, q_heads   heads of K and V; of Q, a multiple of kv_heads (0: kv_heads)
    dim_k, dim_v        channels of K and Q; of V (0: dim_k); even
    layout              how rotary channels pair up: "half" (i, i + rotary_dim/2) or "adjacent" (2i, 2i + 1)
    rotary_dim          rotary channels of K (0: dim_k), the first being rotary_first
    window              attention sees the newest `window` positions (0: all)
    kv_source           None, or the number of the earlier layer whose K and V this one reads
    """

    kv_heads: int
    q_heads: int = 0
    dim_k: int = 128
    dim_v: int = 0
    layout: str = "half"
    rotary_dim: int = 0
    rotary_first: int = 0
    window: int = 0
    kv_source: int | None = None


def layers_of(geometry):
    """[Layer] of a geometry: a Cache, a dict of Layer's fields and n_layers, or a list of such dicts or Layers, one a layer."""
    geometry = getattr(geometry, "layers", geometry)
    if isinstance(geometry, dict):
        fields = dict(geometry)
        geometry = [fields] * fields.pop("n_layers", 1)
    return [_resolved(layer if isinstance(layer, Layer) else Layer(**layer)) for layer in geometry]


def _resolved(layer):
    return layer._replace(q_heads=layer.q_heads or layer.kv_heads, dim_v=layer.dim_v or layer.dim_k)


def c_layers(layers):
    """The layers as a C array that kvq.h takes; it lives as long as the returned object."""
    array = capi.LayerArray(len(layers))
    for i, layer in enumerate(layers):
        c = capi.kvq_layer()
        for field in ("kv_heads", "q_heads", "dim_k", "dim_v", "rotary_dim", "rotary_first", "window"):
            setattr(c, field, getattr(layer, field))
        c.rope_layout = choice(LAYOUTS, layer.layout, "layout")
        c.kv_source = 0 if layer.kv_source is None else layer.kv_source + 1
        array[i] = c
    return array
