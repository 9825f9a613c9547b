"""ggml's flash attention on the CPU, the operator that llama.cpp decodes with, through ctypes: no binding, no build.

    library = Library("DIR with libggml-base.so and libggml-cpu.so")
    attention = Attention(library, "f16", q, k, v, threads=1)
    out = attention.run()                            # [q_heads, dim] float32

ggml's context, tensors and graph are opaque here; only the two structs that pass by value are written down, with room behind the
second for what other versions append.
"""

import ctypes
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}  # enum ggml_type
PRECISION_F32 = 10  # enum ggml_prec: what llama.cpp asks for


class _ContextSize(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("buffer", c_void_p), ("sizes_only", c_bool)]


class _Plan(ctypes.Structure):
    _fields_ = [
        ("work_size", c_size_t),
        ("work", c_void_p),
        ("threads", c_int),
        ("pool", c_void_p),
        ("stop", c_void_p),
        ("stop_argument", c_void_p),
        ("appended", c_uint8 * 256),
    ]


# Function -> (which library, result, arguments).
_FUNCTIONS = {
    "ggml_init": ("base", c_void_p, [_ContextSize]),
    "ggml_free": ("base", None, [c_void_p]),
    "ggml_new_tensor_4d": ("base", c_void_p, [c_void_p, c_int] + [c_int64] * 4),
    "ggml_get_data": ("base", c_void_p, [c_void_p]),
    "ggml_row_size": ("base", c_size_t, [c_int, c_int64]),
    "ggml_quantize_chunk": ("base", c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_flash_attn_ext": ("base", c_void_p, [c_void_p] * 5 + [c_float] * 3),
    "ggml_flash_attn_ext_set_prec": ("base", None, [c_void_p, c_int]),
    "ggml_new_graph": ("base", c_void_p, [c_void_p]),
    "ggml_build_forward_expand": ("base", None, [c_void_p, c_void_p]),
    "ggml_version": ("base", c_char_p, []),
    "ggml_cpu_init": ("cpu", None, []),
    "ggml_graph_plan": ("cpu", _Plan, [c_void_p, c_int, c_void_p]),
    "ggml_graph_compute": ("cpu", c_int, [c_void_p, POINTER(_Plan)]),
}
_FEATURES = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon", "dotprod")


class Library:
    """libggml of a folder; its functions as attributes without the prefix ggml_."""

    def __init__(self, folder):
        files = {}
        for part in ("base", "cpu"):
            found = sorted(Path(folder).glob(f"libggml-{part}*.so"))
            if not found:
                raise FileNotFoundError(f"no libggml-{part}*.so in {folder}; README.md says how to get one")
            files[part] = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
        for name, (part, result, arguments) in _FUNCTIONS.items():
            function = getattr(files[part], name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.cpu_init()
        self.name = f"ggml {self.version().decode()}"
        self.features = [f for f in _FEATURES if getattr(files["cpu"], f"ggml_cpu_has_{f}", int)()]


class Attention:
    """One decode step: q [q_heads, dim] float32 on k, v [kv_heads, tokens, dim] float16, kept in one of TYPES."""

    def __init__(self, library, kind, q, k, v, threads):
        self._library = g = library
        self.kv_heads, self.tokens, dim = k.shape
        code = TYPES[kind]
        row = g.row_size(code, dim)
        self.bytes = 2 * row  # of K and V of a token and KV head
        self._context = g.init(_ContextSize(self.kv_heads * self.tokens * self.bytes + (64 << 20), None, False))
        query = g.new_tensor_4d(self._context, TYPES["f32"], dim, 1, len(q), 1)
        ctypes.memmove(g.get_data(query), q.ctypes.data, q.nbytes)
        cache = [g.new_tensor_4d(self._context, code, dim, self.tokens, self.kv_heads, 1) for _ in range(2)]
        for to, rows in zip(cache, (k, v)):
            for head in range(self.kv_heads):
                self._fill(kind, g.get_data(to) + head * self.tokens * row, rows[head])
        out = g.flash_attn_ext(self._context, query, *cache, None, dim**-0.5, 0.0, 0.0)
        g.flash_attn_ext_set_prec(out, PRECISION_F32)
        self._graph = g.new_graph(self._context)
        g.build_forward_expand(self._graph, out)
        self._plan = g.graph_plan(self._graph, threads, None)
        self._work = ctypes.create_string_buffer(self._plan.work_size + 64)
        self._plan.work = ctypes.addressof(self._work)
        self._out = np.ctypeslib.as_array(ctypes.cast(g.get_data(out), POINTER(c_float)), q.shape)

    def _fill(self, kind, at, rows):
        if kind == "f16":
            rows = np.ascontiguousarray(rows, np.float16)
            ctypes.memmove(at, rows.ctypes.data, rows.nbytes)
        else:
            rows = np.ascontiguousarray(rows, np.float32)
            self._library.quantize_chunk(TYPES[kind], rows.ctypes.data, at, 0, *rows.shape, None)

    def run(self):
        if self._library.graph_compute(self._graph, byref(self._plan)) != 0:
            raise RuntimeError("ggml_graph_compute failed")
        return self._out

    def close(self):
        self._out = None
        self._library.free(self._context)
