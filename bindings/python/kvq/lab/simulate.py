"""What key quantizers do to the attention of a real model, layer by layer: python -m kvq.lab.simulate

The comparison of the papers' own simulations: queries, keys and values of every layer of SmolLM2-135M-Instruct on a held-out window, keys through
one codec at a time, values left alone.  32 sinks are left as they are, the rest of the keys is quantized, and every query of the last quarter of
the window attends causally.  Written to docs/simulation.md.  `--trace` takes the recorded trace (three layers) instead of the model.
"""

import argparse
from dataclasses import dataclass

import numpy as np

import kvq

from . import places, text, trace

SINKS = 32
GROUP = 128
LAYOUT = "adjacent"


@dataclass
class Method:
    """A codec for keys, `policy` filling its `table=` (mask or bits) from the queries and keys of the head."""

    name: str
    codec: str
    policy: str = ""
    table: str = ""


def pair_mix(extra, unit=""):
    return f"pair-mix(low=1,high=3,group={GROUP}{extra}{unit})"


METHODS = (
    Method("PN-Mix, qk-pair", pair_mix(",midpoint=1"), "pnmix(r=1/2,criterion=qk-pair)", "mask"),
    Method("PN-Mix, k-pair", pair_mix(",midpoint=1"), "pnmix(r=1/2,criterion=k-pair)", "mask"),
    Method("PN-Mix, k-magnitude", pair_mix(",midpoint=1", ",unit=channel"), "pnmix(r=1/2,criterion=k-magnitude)", "mask"),
    Method("PN-Mix, k-range", pair_mix(",midpoint=1", ",unit=channel"), "pnmix(r=1/2,criterion=k-range)", "mask"),
    Method("PN-Mix, qk-pair, no midpoint", pair_mix(""), "pnmix(r=1/2,criterion=qk-pair)", "mask"),
    Method("Kitty, 1/16 boosted", f"kitty(boost=1/16,group={GROUP})"),
    Method("ChanMix, 3/2/1 bits", f"channel-widths(group={GROUP},params=e4m3,unit=channel)", "chanmix(share=1/4)", "bits"),
    Method("KIVI, 2 bits", f"affine-channel(levels=4,group={GROUP})"),
    Method("PolarQuant, 2 bits", f"polar(radius=4,angle=4,group={GROUP})"),
    Method("TQ, 2 bits", "lloyd(levels=4)"),
    Method("Block-GTQ, 2 bits", "width-groups()", "blockgtq(avg=2)", "bits"),
    Method("TQ, 3 bits", "lloyd(levels=8)"),
    Method("Block-GTQ, 3 bits", "width-groups()", "blockgtq(avg=3)", "bits"),
    Method(
        "kvq-2 keys", f"channel-widths(group={GROUP},midpoint=1)", "pair-widths(avg=2,bmin=1,bmax=4,unit=4,score=q-var)", "bits"
    ),
)


def codec_text(method, q, k):
    """The method's codec, complete for one head.  q [tokens, heads, dim], k [tokens, dim]."""
    if not method.policy:
        return method.codec
    inputs = dict(k=k, q=q, layout=LAYOUT)
    if method.policy.startswith("chanmix"):
        inputs = dict(pair_scores=np.float64(k.max(0)) - np.float64(k.min(0)), dim=k.shape[1])
    decision = kvq.policy_decide(method.policy, **inputs)
    table = decision.hex() if method.table == "mask" else "".join(map(str, decision))
    start = method.codec[:-1]
    return f"{start}{'' if start.endswith('(') else ','}{method.table}={table})"


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def head_errors(q, k, quantized, first):
    """(mean |logit difference| over quantized keys, mean KL of the attention) of the queries from `first` on."""
    tokens = len(k)
    scale = np.float32(k.shape[1] ** -0.5)
    hidden = np.arange(tokens)[None] > np.arange(first, tokens)[:, None]
    exact, mine = (np.einsum("thd,sd->hts", q[first:], keys) * scale for keys in (k, quantized))
    packed = ~hidden & (np.arange(tokens) >= SINKS)[None]
    mae = np.abs(exact - mine)[:, packed].mean()
    a, b = (log_softmax(np.where(hidden, np.float32(-1e30), x)) for x in (exact, mine))
    return mae, (np.exp(a) * (a - b)).sum(-1).mean()


def measure(method, layers):
    """Errors [layers, 2] (logit MAE, attention KL) and bits; layers: list of (q, k), fp16 [tokens, heads, dim]."""
    errors, bits = [], []
    for q, k in layers:
        ratio = q.shape[1] // k.shape[1]
        packed = (len(k) - SINKS) // GROUP * GROUP
        found = []
        for head in range(k.shape[1]):
            mine, keys = q[:, head * ratio : (head + 1) * ratio], k[:, head]
            codec = codec_text(method, mine, keys)
            body = np.ascontiguousarray(keys[SINKS : SINKS + packed])
            wire = kvq.codec_encode(codec, body, layout=LAYOUT)
            quantized = keys.astype(np.float32)
            quantized[SINKS : SINKS + packed] = kvq.codec_decode(codec, wire, packed, keys.shape[1], layout=LAYOUT)
            bits.append(8 * len(wire) / body.size)
            found.append(head_errors(mine.astype(np.float32), keys.astype(np.float32), quantized, len(k) * 3 // 4))
        errors.append(np.mean(found, 0))
    return np.array(errors), float(np.mean(bits))


def of_model():
    """(q, k) of every layer on the first held-out window."""
    from .model import Model, read_gguf
    from .streams import read_prompt
    from .tokens import Tokens

    reader = read_gguf()
    window = text.handbook_windows(Tokens(reader))[text.HELD_OUT[0]][:1024]
    prompt = read_prompt(Model(reader), window)
    return list(zip(prompt.q, prompt.k, strict=True))


def report(results, layers):
    """Markdown: the table, the orderings, and the layers where an ordering fails."""
    lines = ["| keys | bits | logit MAE | attention KL |", "|--|--:|--:|--:|"]
    for name, (errors, bits) in results.items():
        lines.append(f"| {name} | {bits:.2f} | {errors[:, 0].mean():.4f} | {errors[:, 1].mean():.5f} |")
    lines += ["", f"Means over {layers} layers. Layers in which the first is not better than the second:", ""]
    for better, worse, column, what in ORDERINGS:
        a, b = (results[name][0][:, column] for name in (better, worse))
        lost = np.flatnonzero(a > b)
        holds = "holds" if a.mean() <= b.mean() else "**does not hold**"
        exceptions = ", ".join(map(str, lost)) if len(lost) else "none"
        lines.append(f"- {better} against {worse}, {what}: {a.mean() / b.mean():.2f} of it; {holds}; layers: {exceptions}")
    return lines


ORDERINGS = (
    ("PN-Mix, qk-pair", "PN-Mix, k-pair", 1, "attention KL"),
    ("PN-Mix, k-pair", "PN-Mix, k-magnitude", 1, "attention KL"),
    ("PN-Mix, k-magnitude", "PN-Mix, k-range", 1, "attention KL"),
    ("PN-Mix, qk-pair", "PN-Mix, qk-pair, no midpoint", 1, "attention KL"),
    ("PN-Mix, qk-pair", "Kitty, 1/16 boosted", 1, "attention KL"),
    ("Kitty, 1/16 boosted", "KIVI, 2 bits", 1, "attention KL"),
    ("Block-GTQ, 2 bits", "TQ, 2 bits", 0, "logit MAE"),
    ("Block-GTQ, 3 bits", "TQ, 3 bits", 0, "logit MAE"),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="store_true", help="the recorded trace instead of the model; nothing is written")
    use_trace = parser.parse_args().trace
    if use_trace:
        recorded = trace.load()
        layers = list(zip(recorded.q, recorded.k, strict=True))
    else:
        layers = of_model()
    results = {method.name: measure(method, layers) for method in METHODS}
    lines = report(results, len(layers))
    print("\n".join(lines))
    if use_trace:
        return
    page = places.root() / "docs/simulation.md"
    head = "# Key quantizers on the attention of a real model\n\n`./dev simulate` writes this page.\n\n"
    about = " ".join(line.strip() for line in __doc__.strip().splitlines()[2:])
    page.write_text(head + about + "\n\n" + "\n".join(lines) + "\n")
    print(f"wrote {page.relative_to(places.root())}")


if __name__ == "__main__":
    main()
