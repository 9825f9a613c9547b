"""kvqref: the formats of libkvq, computed from the text of the format specification alone.

    codec(text, Head(dim, tensor, layout, rotary_dim, rotary_first)).encode(x) / .decode(wire, tokens)

The policies are in `kvqref.policies`, the cache model in `kvqref.cache`, the step interpreter in
`python3 -m kvqref.exec`. Section numbers in the docstrings are those of FORMATS.
"""

from .codecs import codec
from .errors import KvqError
from .head import Head

__all__ = ["Head", "KvqError", "codec"]
