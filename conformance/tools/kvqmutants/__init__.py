"""kvqmutants: the Python reference with one deliberate fault, to prove that the vectors notice it.

`python3 -m kvqmutants NAME` speaks the protocol of kvq-conform --exec, like `python3 -m kvqref.exec`, but computes
one thing wrong; `python3 -m kvqmutants` lists the faults. Each names the test that must fail.
"""
