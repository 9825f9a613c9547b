"""Prompt attention on a CUDA device against FP16: bench_prompt.py --driver kvq-bench-prompt [--json FILE].

The baselines are torch's scaled_dot_product_attention with its flash and cuDNN backends on fp16 keys and values of the same shape,
causal (aligned to the last token), timed in the same command on the same device.
"""

import argparse
import json
import subprocess

from report import begin, keep, show

SHAPES = [(n, base + n) for base in (0, 32768) for n in (512, 1024, 2048, 4096)]
RECIPES = "tq-3,tq-2,pnmix,kivi-2,kvq-2.5,semkv,blockgtq-k3v3-fast,fp16"


def baselines(shapes, heads):
    """Median microseconds of FP16 attention per shape and backend."""
    import torch
    import triton
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    q_heads, kv_heads, dim = heads
    rows = []
    for queries, context in shapes:
        q = torch.randn(1, q_heads, queries, dim, device="cuda", dtype=torch.float16)
        k = torch.randn(1, kv_heads, context, dim, device="cuda", dtype=torch.float16)
        v = torch.randn_like(k)
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            row = {"what": name, "queries": queries, "context": context}
            square = queries == context
            # Some backends refuse grouped heads with a bias: they get their keys and values repeated, which their time then includes
            # reading.
            for repeated in (False, True):
                k2, v2 = (x.repeat_interleave(q_heads // kv_heads, 1) if repeated else x for x in (k, v))

                def call(q=q, k=k2, v=v2, repeated=repeated, square=square, mask=causal_lower_right(queries, context)):
                    options = {"is_causal": True} if square else {"attn_mask": mask}
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=not repeated, **options)

                try:
                    with sdpa_kernel(backend):
                        call()
                        row["microseconds"] = triton.testing.do_bench(call, warmup=15, rep=60, return_mode="median") * 1e3
                    row["repeated"] = repeated
                    break
                except RuntimeError as failure:
                    row["failure"] = str(failure)[:200]
            rows.append(row)
        del q, k, v
        torch.cuda.empty_cache()
    return rows


def report_row(row, base):
    """A line for the reader, with the ratios to the baselines."""
    for name in ("flash", "cudnn"):
        other = base.get((name, row["queries"], row["context"]))
        if other and "microseconds" in row:
            row[f"speed_of_{name}"] = other / row["microseconds"]
    show(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--shapes", default=",".join(f"{n}x{t}" for n, t in SHAPES), help="queries x context")
    parser.add_argument("--heads", default="32/8/128", help="query heads / KV heads / dim")
    parser.add_argument("--json")
    options = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in options.shapes.split(",")]
    heads = tuple(map(int, options.heads.split("/")))
    report = begin(heads=options.heads)
    report["baselines"] = baselines(shapes, heads)
    for row in report["baselines"]:
        report_row(row, {})
    base = {(r["what"], r["queries"], r["context"]): r["microseconds"] for r in report["baselines"] if "microseconds" in r}
    for queries, context in shapes:
        command = [options.driver, str(queries), str(context), options.recipes, *map(str, heads)]
        for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
            row = json.loads(line)
            report_row(row, base)
            report["results"].append(row)
    keep(report, options.json)


if __name__ == "__main__":
    main()
