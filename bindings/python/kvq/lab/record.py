"""Record the trace: python -m kvq.lab.record [--out FILE]

Runs SmolLM2 over the first tokens of this project's own story and keeps queries, keys and values of three layers.
"""

import argparse
from pathlib import Path

import numpy as np

from . import text, trace
from .model import Model, read_gguf
from .places import trace_file
from .streams import read_prompt
from .tokens import Tokens

LAYERS = (3, 14, 26)
PROMPT, TOKENS = 512, 640


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=trace_file(), help="where to write it (default: %(default)s)")
    out = parser.parse_args().out
    reader = read_gguf()
    ids = Tokens(reader).encode(text.own_prose())[:TOKENS]
    prompt = read_prompt(Model(reader), ids)
    rows = (np.stack([tensor[i] for i in LAYERS]) for tensor in (prompt.q, prompt.k, prompt.v))
    out.parent.mkdir(parents=True, exist_ok=True)
    trace.save(trace.Trace(*rows, np.array(LAYERS), PROMPT), out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
