"""Tokens per second of a decoder on a CUDA device, its cache quantized against FP16: bench_decoder.py --library libkvq.so.1 [--json FILE].

The model has the geometry of an 8B Llama (32 layers, 32 query and 8 KV heads of 128 channels, hidden 4096, feed-forward 14336, 128256
words) with random FP16 weights.  One loop serves every row, the whole step in a CUDA graph over all layers; only where K and V go
and what attends to them differ: libkvq through its C ABI, or FP16 tensors and torch's scaled_dot_product_attention.  Prompts are
random keys and values, which do not change what a step costs.  The FP16 rows attend to a cache of fixed length and leave out what a
server would need to grow it.
"""

import argparse
import contextlib
import ctypes
import math
import time

import torch
from report import begin, keep, show
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS, Q_HEADS, KV_HEADS, DIM, HIDDEN, FEED_FORWARD, WORDS = 32, 32, 8, 128, 4096, 14336, 128256
CHUNK = 32768  # tokens of a prompt handed over at a time
F16, DEVICE, CUDA, FINAL = 1, 1, 1, 1


# ---------------------------------------------------------------------------------------------------- libkvq


def struct(name, fields):
    """A struct of kvq.h; fields: "type name" in the order of the header, as far as this program needs them."""
    types = {
        "u32": ctypes.c_uint32,
        "u64": ctypes.c_uint64,
        "i64": ctypes.c_int64,
        "ptr": ctypes.c_void_p,
        "text": ctypes.c_char_p,
    }
    members = [(field.split()[1], types[field.split()[0]]) for field in ["u32 struct_size", *fields]]
    return type(name, (ctypes.Structure,), {"_fields_": members})


Layer = struct("Layer", ["u32 kv_heads", "u32 q_heads", "u32 dim_k"])
Config = struct(
    "Config",
    ["u32 backend", "u32 device", "u32 n_layers", "ptr layers", "u32 n_layer_structs", "u32 n_threads", "text recipe"],
)
Tensor = struct("Tensor", ["u32 dtype", "u32 memory", "u32 reserved", "ptr data", "i64 token_stride", "i64 head_stride"])
Prefill = struct(
    "Prefill",
    ["u32 layer", "u32 flags", "u32 n_scores", "u64 n_tokens", "ptr k", "ptr v", "ptr q", "ptr scores"],
)
Stats = struct("Stats", ["u32 sequences", "u64 bytes_used"])


def sized(kind, **fields):
    return kind(struct_size=ctypes.sizeof(kind), **fields)


def tensor(x):
    """x [tokens, heads, channels] on the device."""
    return sized(Tensor, dtype=F16, memory=DEVICE, data=x.data_ptr(), token_stride=x.stride(0), head_stride=x.stride(1))


class Library:
    """The calls of kvq.h that a decoder makes; failures become exceptions."""

    def __init__(self, path):
        self._library = ctypes.CDLL(path)

    def __getattr__(self, name):
        function = getattr(self._library, "kvq_" + name)

        def call(*arguments):
            status = function(*arguments)
            if status != 0:
                detail = ctypes.create_string_buffer(1024)
                self._library.kvq_error_detail(detail, ctypes.c_size_t(1024), None)
                raise RuntimeError(f"kvq_{name}: status {status}: {detail.value.decode()}")

        setattr(self, name, call)
        return call


class Quantized:
    """A cache of libkvq for `batch` sequences of `context` tokens."""

    def __init__(self, library, recipe, batch, context):
        self.library, self.batch = library, batch
        layer = sized(Layer, kv_heads=KV_HEADS, q_heads=Q_HEADS, dim_k=DIM)
        config = sized(Config, backend=CUDA, n_layers=LAYERS, n_layer_structs=1, recipe=recipe.encode())
        config.layers = ctypes.addressof(layer)
        self.cache = ctypes.c_void_p()
        library.create(ctypes.byref(config), ctypes.byref(self.cache))
        self.sequences = (ctypes.c_uint64 * batch)()
        self.ones = (ctypes.c_uint32 * batch)(*[1] * batch)
        self.step = ctypes.c_uint64()
        scores = torch.rand(context).numpy()
        for i in range(batch):
            sequence = ctypes.c_uint64()
            library.seq_create(self.cache, ctypes.byref(sequence))
            self.sequences[i] = sequence.value
            self._fill(sequence, context, scores, "semkv" in recipe)
        torch.cuda.synchronize()

    def _fill(self, sequence, context, scores, scored):
        k, v, q = (torch.randn(CHUNK, heads, DIM, device="cuda", dtype=torch.float16) for heads in (KV_HEADS, KV_HEADS, Q_HEADS))
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            for first in range(0, context, CHUNK):
                n = min(CHUNK, context - first)
                prompt = sized(Prefill, layer=layer, flags=FINAL if first + n == context else 0, n_tokens=n)
                views = [tensor(x) for x in (k, v, q)]
                prompt.k, prompt.v, prompt.q = map(ctypes.addressof, views)
                if scored and layer == 0:
                    prompt.n_scores, prompt.scores = n, scores[first:].ctypes.data
                self.library.prefill_commit(self.cache, sequence, ctypes.byref(prompt), None)

    def bytes(self):
        stats = sized(Stats)
        self.library.stats_get(self.cache, ctypes.byref(stats))
        return stats.bytes_used

    def begin(self):
        self.library.step_begin(self.cache, self.sequences, self.ones, self.batch, 0, ctypes.byref(self.step))

    def attend(self, layer, q, k, v, out):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        views = [ctypes.byref(tensor(x)) for x in (k, v, q, out)]
        self.library.append(self.cache, self.step, layer, views[0], views[1], None, stream)
        self.library.attend(self.cache, self.step, layer, views[2], views[3], None, None, stream)

    def end(self):
        scores = (ctypes.c_float * self.batch)(*[0.5] * self.batch)
        self.library.step_end(self.cache, self.step, None, scores)

    def close(self):
        self.library._library.kvq_destroy(self.cache)


class Plain:
    """FP16 keys and values; the token of a step takes the last place."""

    def __init__(self, backend, batch, context):
        self.backend = backend
        self.kv = [torch.empty(2, batch, KV_HEADS, context + 1, DIM, device="cuda", dtype=torch.float16) for _ in range(LAYERS)]
        for kv in self.kv:
            kv.normal_()

    def bytes(self):
        return sum(kv.numel() * 2 for kv in self.kv)

    def begin(self):
        pass

    def attend(self, layer, q, k, v, out):
        keys, values = self.kv[layer]
        keys[:, :, -1].copy_(k)
        values[:, :, -1].copy_(v)
        with sdpa_kernel(self.backend):
            seen = functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True)
        out.copy_(seen.squeeze(2))

    def end(self):
        pass

    def close(self):
        self.kv = []
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------- the decoder


class Weights:
    def __init__(self):
        def matrix(rows, columns):
            return torch.randn(columns, rows, device="cuda", dtype=torch.float16).mul_(1 / math.sqrt(rows)).t()

        width = (Q_HEADS + 2 * KV_HEADS) * DIM
        self.layers = [
            (matrix(HIDDEN, width), matrix(Q_HEADS * DIM, HIDDEN), matrix(HIDDEN, 2 * FEED_FORWARD), matrix(FEED_FORWARD, HIDDEN))
            for _ in range(LAYERS)
        ]
        self.words = torch.randn(WORDS, HIDDEN, device="cuda", dtype=torch.float16)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.float16)
        angles = torch.outer(torch.arange(1 << 18, device="cuda"), 500000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM))
        # The second half of a head turns with the first: x cos + (x, halves swapped) sin, its sign with the sine.
        self.cos, self.sin = (torch.cat(x, -1).half() for x in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))

    def bytes(self):
        return 2 * (sum(x.numel() for layer in self.layers for x in layer) + self.words.numel())


class Decoder:
    """One token of every sequence: next words from words, in buffers of fixed address."""

    def __init__(self, weights, cache, batch, context):
        self.weights, self.cache, self.batch = weights, cache, batch
        self.word = torch.randint(WORDS, (batch,), device="cuda")
        self.position = torch.full((1,), context, device="cuda")
        self.out = [torch.empty(batch, Q_HEADS, DIM, device="cuda", dtype=torch.float16) for _ in range(LAYERS)]
        self.graph = None

    def layers(self):
        w = self.weights
        x = w.words[self.word]
        cos, sin = w.cos[self.position].unsqueeze(1), w.sin[self.position].unsqueeze(1)
        for layer, (qkv, o, up, down) in enumerate(w.layers):
            heads = (functional.rms_norm(x, (HIDDEN,), w.norm) @ qkv).view(self.batch, -1, DIM)
            turned = heads[:, : Q_HEADS + KV_HEADS]
            turned = torch.addcmul(turned * cos, turned.roll(DIM // 2, -1), sin)
            self.cache.attend(layer, turned[:, :Q_HEADS], turned[:, Q_HEADS:], heads[:, Q_HEADS + KV_HEADS :], self.out[layer])
            x.addmm_(self.out[layer].view(self.batch, -1), o)
            gate, value = (functional.rms_norm(x, (HIDDEN,), w.norm) @ up).chunk(2, dim=-1)
            x.addmm_(functional.silu(gate) * value, down)
        logits = functional.rms_norm(x, (HIDDEN,), w.norm) @ w.words.t()
        self.word.copy_(logits.argmax(-1))
        self.position.add_(1)

    def step(self):
        self.cache.begin()
        if self.graph is None:
            self.layers()
        else:
            self.graph.replay()
        torch.cuda.current_stream().synchronize()
        self.cache.end()

    def capture(self):
        """Three plain steps, then the layers of the fourth as a graph, which that step replays."""
        for _ in range(3):
            self.step()
        self.cache.begin()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.layers()
        graph.replay()
        torch.cuda.synchronize()
        self.cache.end()
        self.graph = graph


def seconds_per_step(decoder, steps):
    """Median of three runs."""
    runs = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            decoder.step()
        torch.cuda.synchronize()
        runs.append((time.perf_counter() - start) / steps)
    return sorted(runs)[1]


def measure(weights, make, batch, context, steps):
    cache = decoder = None
    try:
        start = time.perf_counter()
        cache = make(batch, context)
        filled = time.perf_counter() - start
        with torch.cuda.stream(torch.cuda.Stream()):
            decoder = Decoder(weights, cache, batch, context)
            plain = seconds_per_step(decoder, max(2, steps // 8))
            decoder.capture()
            graph = seconds_per_step(decoder, steps)
        return {
            "milliseconds": graph * 1e3,
            "milliseconds_without_graph": plain * 1e3,
            "tokens_per_second": batch / graph,
            "cache_bytes": cache.bytes(),
            "fill_seconds": filled,
        }
    except (RuntimeError, torch.OutOfMemoryError) as failure:
        return {"failure": str(failure).splitlines()[0][:160]}
    finally:
        del decoder
        with contextlib.suppress(AttributeError):
            cache.close()
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--recipes", default="kvq-2,tq-3,kvq-3")
    parser.add_argument("--shapes", default="1x131072,8x32768,24x32768,96x32768")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600, help="begin no row after this many")
    parser.add_argument("--json")
    options = parser.parse_args()
    library, weights = Library(options.library), Weights()
    report = begin(
        model=f"{LAYERS} layers, {Q_HEADS}/{KV_HEADS} heads of {DIM}, hidden {HIDDEN}, feed-forward {FEED_FORWARD}, FP16, random",
        weight_bytes=weights.bytes(),
    )
    rows = {
        "fp16 cudnn": lambda *shape: Plain(SDPBackend.CUDNN_ATTENTION, *shape),
        "fp16 flash": lambda *shape: Plain(SDPBackend.FLASH_ATTENTION, *shape),
    }
    for recipe in options.recipes.split(","):
        rows[recipe] = lambda *shape, recipe=recipe: Quantized(library, recipe, *shape)
    start = time.perf_counter()
    for batch, context in (map(int, shape.split("x")) for shape in options.shapes.split(",")):
        for name, make in rows.items():
            if time.perf_counter() - start > options.seconds:
                break
            row = {"batch": batch, "context": context, "cache": name, **measure(weights, make, batch, context, options.steps)}
            report["results"].append(row)
            show(row)
            keep(report, options.json)


if __name__ == "__main__":
    main()
