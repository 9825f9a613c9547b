"""A small real model on top of kvq, to see what a recipe does to it.

`kvq.lab.model`    SmolLM2-135M-Instruct in numpy; the cache and the attention are left to the caller
`kvq.lab.streams`  decoding over kvq sequences, many recipes at once
`kvq.lab.tokens`   its tokenizer
`kvq.lab.text`     prose to read: windows of the Debian handbook, or a text of our own
`kvq.lab.metrics`  divergence, perplexity and their standard errors
`kvq.lab.trace`    recorded queries, keys and values of a few layers, and attention errors on them
`kvq.lab.plot`     quality against bits, as a picture

Needs the packages of bindings/python/requirements-lab.txt.
"""
