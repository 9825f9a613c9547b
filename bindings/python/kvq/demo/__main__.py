"""Show what quantized caches do to a small language model.

SmolLM2-135M-Instruct reads a story (1024 tokens), and every recipe's cache takes it over.  Then each recipe reads on,
token by token, while its predictions are compared with those over fp16, and answers a question about the story.
"""

import argparse
from pathlib import Path

from kvq.lab import places

RECIPES = (
    "fp16",
    "tq-3",
    "kvq-3",
    "blockgtq-k2v2",
    "semkv-tq",
    "kvq-2.5",
    "kitty",
    "pnmix",
    "kivi-2",
    "tq-2",
    "tq-2c",
    "semkv-tq-2",
    "kvq-2",
)
SCORED = 384  # tokens


def arguments():
    parser = argparse.ArgumentParser(
        prog="python -m kvq.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--offline", action="store_true", help="no model: attention alone, on a recorded trace")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="recipes, separated by commas; fp16 comes first anyway")
    parser.add_argument("--text", default="story", help="story (our own), handbook (fetched with apt), or a text file")
    parser.add_argument("--tokens", type=int, default=SCORED, help="tokens to compare on (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each cache's attention (default %(default)s)")
    parser.add_argument("--picture", type=Path, help="where to write the picture (default build/demo/quality.png)")
    return parser.parse_args()


def main():
    args = arguments()
    recipes = ["fp16", *(r for r in args.recipes.split(",") if r and r != "fp16")]
    picture = args.picture or places.build("demo") / "quality.png"
    from . import offline, online

    if args.offline:
        offline.run(recipes, args.threads, picture)
        return
    try:
        online.run(recipes, args.text, args.tokens, args.threads, picture)
    except online.ModelMissing as missing:
        raise SystemExit(f"{missing}\nWithout it: python -m kvq.demo --offline") from None


if __name__ == "__main__":
    main()
