"""kvqvectors: writes and checks the conformance vectors (FORMATS section 10).

One module per area makes tests; every expected value comes from the Python reference, and many tests also
assert an independent fact about it, so that a defect of the reference stops the generation.
`python3 -m kvqvectors write` and `check` are the only ways in and out of conformance/vectors.
"""
