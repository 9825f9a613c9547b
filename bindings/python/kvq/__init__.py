"""kvq: a language model's KV cache at 2 to 4 bits per number, and attention computed on the packed form.

    import kvq, numpy as np

    cache = kvq.Cache("kvq-3", n_layers=2, kv_heads=2, q_heads=8, dim_k=128)
    seq = cache.create()
    for layer in range(2):
        seq.prefill(layer, k, v, q)              # arrays [tokens, heads, channels]
    seq.commit()                                 # freeze the policy and pack
    with cache.step([seq], [1]) as step:
        for layer in range(2):
            step.append(layer, k1, v1)
            out = step.attend(layer, q1)         # [1, q_heads, dim_v] float32
        step.end()

Arrays are float16, float32 or float64; float64 enters through float32, and everything is rounded to fp16 (saturating at
+-65504).  bfloat16 comes as ml_dtypes.bfloat16, or as uint16 where a call or a cache says bf16=True.  Views are read in place
if their last axis is contiguous, and copied otherwise.

Failures of the library raise kvq.Error, whose .status is one of the kvq.E_* numbers and whose .detail says which argument, which
value and what was allowed.  Arrays of a wrong shape or type raise ValueError or TypeError before the library is called.
"""

from . import _library  # loads libkvq; must come first
from ._error import *  # noqa: F403
from .cache import Cache, Lengths, Sequence, Step
from .geometry import Layer
from .stateless import (
    account,
    backends,
    codec_decode,
    codec_encode,
    policy_decide,
    policy_stats,
    presets,
    recipe,
    scores_attention,
    scores_hidden,
    scores_norms,
    scores_random,
    scores_self_information,
)

__version__ = _library.version
library = _library.file
