"""Loading the library, and calls from several threads."""

import os
import subprocess
import sys
import threading

import numpy as np

import kvq


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)


def test_kvq_library_names_the_file_to_load():
    seen = run("import kvq; print(kvq.library)", KVQ_LIBRARY=os.path.realpath(kvq.library))
    assert seen.stdout.strip() == os.path.realpath(kvq.library)


def test_a_missing_or_wrong_library_is_named():
    for file, why in (("no-such-file.so", "no-such-file.so"), ("libc.so.6", "has no kvq_")):
        seen = run("import kvq", KVQ_LIBRARY=file)
        assert seen.returncode and why in seen.stderr and "KVQ_LIBRARY" in seen.stderr


def test_threads_use_different_sequences_of_one_cache(rows):
    with kvq.Cache("tq-3", kv_heads=2, q_heads=4, dim_k=64) as cache:
        k, q = rows(200, 2, 64), rows(1, 4, 64)
        outputs = [None] * 4

        def generate(i):
            seq = cache.create()
            seq.prefill(0, k, k, final=True)
            for token in range(20):
                with cache.step([seq], [1]) as step:
                    step.append(0, k[token : token + 1], k[token : token + 1])
                    outputs[i] = step.attend(0, q)
                    step.end()

        threads = [threading.Thread(target=generate, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(np.array_equal(out, outputs[0]) for out in outputs)
