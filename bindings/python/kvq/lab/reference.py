"""What llama.cpp says about the first tokens of our story, for a test of the model: python -m kvq.lab.reference FILE.npz

Needs llama-cpp-python.  Per token: the RANKED likeliest next tokens and their log-probabilities, and the log-probability of the
token that follows.
"""

import argparse

import numpy as np

from .metrics import log_softmax
from .model import model_file
from .text import own_prose

TOKENS = 1024
RANKED = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="where to write it")
    file = parser.parse_args().file
    import llama_cpp

    llama = llama_cpp.Llama(str(model_file()), n_ctx=TOKENS, logits_all=True, verbose=False)
    ids = np.array(llama.tokenize(own_prose().encode(), add_bos=False, special=False), np.int32)
    llama.eval(ids[:TOKENS].tolist())
    log_p = log_softmax(np.array(llama.scores[:TOKENS], np.float32))
    ranked = np.argsort(-log_p, axis=1)[:, :RANKED]
    np.savez_compressed(
        file,
        ids=ids,
        ranked=ranked.astype(np.uint16),
        log_p=np.take_along_axis(log_p, ranked, axis=1).astype(np.float16),
        next_log_p=log_p[np.arange(TOKENS), ids[1 : TOKENS + 1]].astype(np.float32),
    )


if __name__ == "__main__":
    main()
