"""Types, strides and shapes of the arrays that the package takes."""

import numpy as np
import pytest

import kvq


@pytest.fixture
def keys():
    """What a cache stores as keys, [tokens, heads, 64]: stages k and reads it back."""

    def stage(k, bf16=False):
        with kvq.Cache("fp16", kv_heads=2, dim_k=64, bf16=bf16) as cache:
            seq = cache.create()
            seq.prefill(0, k, np.zeros((len(k), 2, 64), np.float16))
            return np.stack([seq.values(0, head, "k", 0, len(k)) for head in range(2)], 1)

    return stage


def bfloat16(x):
    """The upper half of float32, exact for the values that it is used for."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_every_float_type_stores_the_same(keys, rng):
    x = np.round(rng.standard_normal((5, 2, 64)) * 16) / 16  # few bits: exact in all types
    for dtype in (np.float64, np.float32, np.float16, ">f4", ">f2"):
        assert np.array_equal(keys(x.astype(dtype)), x), dtype
    assert np.array_equal(keys(x.tolist()), x)
    assert np.array_equal(keys(bfloat16(x), bf16=True), x)


def test_uint16_is_bfloat16_only_on_request(keys):
    with pytest.raises(TypeError, match="bf16=True"):
        keys(np.zeros((5, 2, 64), np.uint16))
    for dtype in (np.int32, np.complex64, np.uint8):
        with pytest.raises(TypeError, match="must be float16"):
            keys(np.zeros((5, 2, 64), dtype))


def test_views_mean_what_they_show(keys, rows):
    x = rows(12, 6, 64)
    views = {
        "tokens apart": x[::2, :2],
        "heads apart": x[:, 1::3],
        "tokens reversed": x[::-1, :2],
        "heads first": np.ascontiguousarray(x[:, :2].transpose(1, 0, 2)).transpose(1, 0, 2),
        "channels apart": np.repeat(x[:, :2], 2, axis=2)[:, :, ::2],
        "channels reversed": x[:, :2, ::-1],
        "one row for all": np.broadcast_to(x[:1, :2], (7, 2, 64)),
        "one head for all": np.broadcast_to(x[:, :1], (12, 2, 64)),
        "read-only": np.frombuffer(x[:, :2].tobytes(), np.float32).reshape(12, 2, 64),
        "no tokens": x[:0, :2],
    }
    for name, view in views.items():
        assert np.array_equal(keys(view), view), name


def test_wrong_shapes_are_named_before_the_library_sees_them(keys):
    for shape in ((5, 2, 63), (5, 3, 64), (5, 128), (5, 2, 64, 1)):
        with pytest.raises(ValueError, match="k has shape"):
            keys(np.zeros(shape, np.float32))


def test_inputs_are_not_changed(keys, rows):
    x = rows(5, 2, 64)
    x.flags.writeable = False
    keys(x)
