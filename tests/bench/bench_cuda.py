"""Decode attention on a CUDA device against FP16: bench_cuda.py --driver kvq-bench-cuda [--json FILE].

The baselines are torch's scaled_dot_product_attention with its cuDNN and flash backends, timed in the same command on the same device.
"""

import argparse
import json
import os
import subprocess

from report import begin, keep, show

SHAPES = [(1, 8192), (1, 32768), (1, 131072), (8, 32768), (64, 4096), (16, 131072)]
RECIPES = [
    "tq-3",
    "tq-2",
    "tq-4",
    "pnmix",
    "kivi-2",
    "kivi-2-g32",
    "kvq-2.5",
    "kvq-2",
    "kvq-3",
    "semkv",
    "blockgtq-k3v3",
    "blockgtq-k3v3-fast",
    "fp16",
]


def baselines(shapes, heads):
    """Median seconds of FP16 attention per shape and backend, and the device's read rate."""
    import torch
    import triton
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def median(call):
        return triton.testing.do_bench(call, warmup=25, rep=80, return_mode="median") * 1e-3

    q_heads, kv_heads, dim = heads
    x = torch.randn(2**29, device="cuda")
    rows = [{"what": "read", "terabytes_per_second": x.numel() * 4 / median(x.sum) * 1e-12}]
    del x
    for batch, context in shapes:
        q = torch.randn(batch, q_heads, 1, dim, device="cuda", dtype=torch.float16)
        k = torch.randn(batch, kv_heads, context, dim, device="cuda", dtype=torch.float16)
        v = torch.randn_like(k)
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            with sdpa_kernel(backend):

                def call(q=q, k=k, v=v):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

                call()
                us = median(call) * 1e6
            rows.append(
                {
                    "what": name,
                    "batch": batch,
                    "context": context,
                    "microseconds": us,
                    "terabytes_per_second": 4 * k.numel() / us * 1e-6,
                }
            )
        del q, k, v
        torch.cuda.empty_cache()
    return rows


def calls(driver, recipes):
    """Packing of a prompt, and what the calls of a step cost the host (bench_calls.cu)."""
    command = [os.path.join(os.path.dirname(driver), "kvq-bench-calls"), "32768", *recipes.split(",")]
    rows = [json.loads(line) for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()]
    for row in rows:
        show(row)
    return rows


def measure(driver, recipe, batch, context, heads, *more):
    """One line of the driver; more: new tokens of a sequence, and "invariant"."""
    command = [driver, recipe, *map(str, (batch, context, *heads, *more))]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        return json.loads(text.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as failure:
        return {"recipe": recipe, "batch": batch, "context": context, "failure": str(failure)[:200]}


def others(driver, heads):
    """Drafts (several new tokens of a sequence), and what it costs that results do not depend on the batch."""
    rows = [measure(driver, recipe, 8, 32768, heads, n) for recipe in ("tq-3", "pnmix") for n in (1, 2, 4, 8)]
    rows += [
        measure(driver, "tq-3", batch, context, heads, 1, "invariant")
        for batch, context in ((8, 32768), (64, 4096), (16, 131072))
    ]
    for row in rows:
        print(
            " ".join(f"{key}={row.get(key)}" for key in ("recipe", "batch", "context", "new_tokens", "invariant", "microseconds"))
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--shapes", default=",".join(f"{b}x{t}" for b, t in SHAPES))
    parser.add_argument("--heads", default="32/8/128", help="query heads / KV heads / dim")
    parser.add_argument("--json")
    options = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in options.shapes.split(",")]
    heads = tuple(map(int, options.heads.split("/")))
    report = begin(heads=options.heads)
    report["baselines"] = baselines(shapes, heads)
    fp16 = {(row["batch"], row["context"]): row["microseconds"] for row in report["baselines"] if row["what"] == "cudnn"}
    for row in report["baselines"]:
        show(row)
    for recipe in options.recipes.split(","):
        for batch, context in shapes:
            row = measure(options.driver, recipe, batch, context, heads)
            if "microseconds" in row:
                row["times_fp16"] = fp16[batch, context] / row["microseconds"]
                print(
                    f"{recipe:14s} {batch:3d}x{context:<7d} {row['microseconds']:9.1f} us {row['terabytes_per_second']:6.2f} TB/s "
                    f"{row['bytes_per_token_head']:7.2f} B {row['times_fp16']:6.2f}x error {row['error']:.1e} "
                    f"pack {row['commit_gigabytes_per_second']:.0f} GB/s host {row['host_attend_us']:.1f} us",
                    flush=True,
                )
            else:
                print(f"{recipe:14s} {batch:3d}x{context:<7d} {row['failure']}", flush=True)
            report["results"].append(row)
        keep(report, options.json)  # what is interrupted keeps what it has
    report["others"] = others(options.driver, heads)
    report["calls"] = calls(options.driver, options.recipes)
    keep(report, options.json)


if __name__ == "__main__":
    main()
