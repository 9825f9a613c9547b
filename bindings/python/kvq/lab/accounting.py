"""What a sequence costs in bytes."""

from dataclasses import dataclass

import numpy as np

import kvq

LONG = 32768  # tokens behind which sinks and raw tail no longer show in the bits


@dataclass
class Cost:
    """What one sequence takes, and what its recipe takes in the long run."""

    bits: float  # per element of packed tokens and sinks at `long` tokens, with all parameters
    bits_k: float
    bits_v: float
    bytes: int  # of this sequence: packed tokens, sinks, tables and raw tail
    fp16_bytes: int  # of the same tokens


def cost(cache, tokens, long=LONG, **data):
    """Cost of a sequence of `tokens` tokens in `cache`, as if it had been committed at once.

    data: what the cache was made with beside its recipe (bits, scores or budgets).
    """
    if "policy=blockgtq" in cache.recipe:
        data = dict(bits=policy_tables(cache.policy()))
    here, there = (kvq.account(cache.recipe, cache, n, **data) for n in (tokens, long))
    return Cost(
        bits=there.effective_bits,
        bits_k=there.effective_bits_k,
        bits_v=there.effective_bits_v,
        bytes=here.wire_bytes + here.metadata_bytes + here.tail_bytes,
        fp16_bytes=here.fp16_bytes,
    )


def policy_tables(blob):
    """The tables of K (widths or a mask, uint8 [layer][kv_head][entries]) in a policy blob.

    The blob: "kvqp", version, recipe text, the layers with nine numbers each, then for every layer and KV head the table of K,
    the table of V and the centre, each as a count and its entries.  Counts and numbers are 32 bits, little-endian.
    """
    place = len("kvqp") + 4

    def take(size):
        nonlocal place
        place += size
        return blob[place - size : place]

    def count():
        return int.from_bytes(take(4), "little")

    take(count())
    kv_heads = [[count() for _ in range(9)][0] for _ in range(count())]
    tables = []
    for heads in kv_heads:
        layer = []
        for _ in range(heads):
            layer.append(np.frombuffer(take(count()), np.uint8))
            take(count())
            take(2 * count())
        tables.append(layer)
    return np.array(tables)
