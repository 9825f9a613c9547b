"""Section 10: arrays of vector files and the step interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvqref.arrays import read_array, write_array
from kvqref.errors import KvqError
from kvqref.exec import Interpreter

GEOMETRY = {"layers": 1, "kv_heads": 1, "q_heads": 2, "dim_k": 8, "dim_v": 8}


def f32(x):
    return write_array(np.asarray(x, np.float32), "f32")


def run(*steps):
    interpreter = Interpreter()
    return [interpreter.step(step) for step in steps]


def test_hex_arrays():
    assert read_array({"dtype": "f16", "shape": [2], "hex": "003c00c0"}).tolist() == [1, -2]
    assert read_array({"dtype": "bf16", "shape": [1, 1], "hex": "c03f"}).tolist() == [[1.5]]
    assert read_array({"dtype": "i32", "shape": [1], "hex": "ffffffff"}).tolist() == [-1]
    with pytest.raises(KvqError, match="INVALID"):
        read_array({"dtype": "u8", "shape": [2], "hex": "00"})


def test_generated_arrays():
    # splitmix64 of 1234567 is 6457827717110365317
    u = (6457827717110365317 >> 40) / 2**23 - 1
    gen = {"kind": "splitmix", "seed": 1234567, "mul": 3, "add": 0.5, "chan_mul": [2, 1], "chan_add": [1, 0]}
    x = read_array({"dtype": "f32", "shape": [1, 2], "gen": gen})
    assert x[0, 0] == np.float16(np.float32((3 * u + 0.5) * 2 + 1)) and x.dtype == np.float32
    assert read_array({"dtype": "f16", "shape": [0, 2], "gen": gen}).shape == (0, 2)
    big = {"kind": "splitmix", "seed": str(2**64 - 1), "mul": 1e6, "add": 0}
    assert np.abs(read_array({"dtype": "f64", "shape": [50], "gen": big})).max() == 65504


def test_encode_and_decode():
    (encoded,) = run(
        {"op": "encode", "codec": "affine-channel(levels=16,group=2)", "dim": 1, "tensor": "k", "x": f32([[0], [15]])}
    )
    assert encoded == {"status": "OK", "result": {"wire": "f0003c0000"}}
    step = {"op": "decode", "codec": "affine-channel(levels=16,group=2)", "dim": 1, "tensor": "k", "tokens": 2}
    good, bad, nonsense = run(step | {"wire": "f0003c0000"}, step | {"wire": "f0003c00"}, step | {"codec": "x", "wire": ""})
    assert read_array(good["result"]["values"]).tolist() == [[0], [15]]
    assert bad["status"] == "CORRUPT" and nonsense["status"] == "INVALID"


def test_stats_step():
    k, q = [[3, 4], [0, -1]], [[[1, 0]], [[0, 2]]]
    (answer,) = run({"op": "stats", "k": f32(k), "q": f32(q)})
    one = 2**24
    result = answer["result"]
    assert result["K1"] == [str(6 * one)] and result["K2"] == [str(26 * one)]
    assert result["Q1"] == [str(3 * one)] and result["Q2"] == [str(5 * one)]
    assert result["sum"] == [str(3 * one), str(3 * one)] and result["abs"] == [str(3 * one), str(5 * one)]
    assert (result["nk"], result["nq"]) == (2, 2)
    assert read_array(result["min"]).tolist() == [0, -1] and read_array(result["max"]).tolist() == [3, 4]


def test_policy_steps():
    k = np.ones((2, 8))
    k[:, [2, 6]] = 9
    answers = run(
        {"op": "policy", "name": "pnmix", "r": "1/4", "k": f32(k), "q": f32(np.ones((2, 8)))},
        {"op": "policy", "name": "blockgtq", "avg": 2, "scores": [1, 1, 1, 1]},
        {"op": "policy", "name": "pair-widths", "avg": "5/2", "bmin": 0, "bmax": 6, "score": "k-only", "k": f32(k)},
        {"op": "policy", "name": "semkv-prompt", "r": "1/2", "scores": f32([1, 3, 2, 0])},
        {"op": "policy", "name": "semkv-block", "r": "1/4", "scores": f32([1, 3, 2, 0, 0, 0])},
        {"op": "policy", "name": "kitty", "boost": "1/8", "k": f32(k)},
        {"op": "policy", "name": "chanmix", "r_h": "1/2", "scores": [0.5, 0.1, 0.9, 0.2]},
        {"op": "policy", "name": "chanmix", "range": [1, 2, 3, 4]},
        {"op": "policy", "name": "channel-split", "r": "1/4", "k": f32(k)},
        {"op": "policy", "name": "center", "k": f32(k)},
        {
            "op": "policy",
            "name": "pmkvq-shrink",
            "tokens": 1,
            "budgets": [32, 31, "24", 0],
            "kv_heads": 1,
            "dim_k": 8,
            "dim_v": 8,
        },
        {"op": "policy", "name": "pnmix", "r": "1/4", "k": f32(k)},
    )
    results = [a["result"] for a in answers]
    assert results[0] == {"mask": "04"}
    assert read_array(results[1]["bits"]).tolist() == [2, 2, 2, 2]
    # energies 2, 2, 162, 2 and 10 bits: pair 2 takes 4 (162/4^3 = 2.5 > 2), the others 1 each (2/4 = .5),
    # pair 2 one more (162/4^4 = .63), the last two go to pairs 0 and 1
    assert read_array(results[2]["bits"]).tolist() == [2, 2, 5, 1]
    assert results[3] == {"flags": "06"} and results[4] == {"flags": "06"}
    assert results[5] == {"mask": "04"} and results[6] == {"mask": "05"}
    assert read_array(results[7]["bits"]).tolist() == [1, 2, 2, 3]
    assert results[8] == {"mask": "44"}
    assert read_array(results[9]["mu"]).tolist() == k[0].tolist()
    assert read_array(results[10]["bits"]).tolist() == [16, 8, 8, 2]
    assert answers[11]["status"] == "STATE"


def test_a_small_story():
    x = np.arange(64).reshape(1, 1, 8, 8)
    tokens = {"k": f32(x), "v": f32(-x)}
    answers = run(
        {"op": "create", "recipe": {"k": "raw", "v": "raw", "sinks": 1, "recent": 0, "block": 4}, "geometry": GEOMETRY},
        {"op": "commit", "seq": "a", **tokens},
        {"op": "fork", "seq": "a", "to": "b"},
        {"op": "truncate", "seq": "a", "length": 3},
        {"op": "save"},
        {"op": "append", "seq": "a", **tokens},
        {"op": "load"},
        {"op": "export", "seq": "a", "layer": 0, "head": 0, "tensor": "v", "first": 1, "count": 2},
        {"op": "export", "seq": "b", "layer": 0, "head": 0, "tensor": "k", "block": 0},
        {"op": "attend", "seq": "b", "layer": 0, "q": f32(np.zeros((2, 1, 8))), "scale": 1.0},
        {"op": "end_turn", "seq": "b"},
        {"op": "remove", "seq": "b"},
        {"op": "end_turn", "seq": "b"},
        {"op": "create", "recipe": {"k": "raw", "v": "nothing"}, "geometry": GEOMETRY},
        {"op": "account", "preset": "tq-2", "tokens": 64, "geometry": GEOMETRY},
    )
    assert [a["status"] for a in answers] == ["OK"] * 12 + ["STALE", "INVALID", "OK"]
    results = [a["result"] for a in answers]
    assert results[1] == {"lengths": {"sinks": 1, "packed": 4, "tail": 3}}
    assert results[3] == {"lengths": {"sinks": 1, "packed": 2, "tail": 0}}
    assert read_array(results[7]["values"]).tolist() == (-x[0, 0, 1:3]).tolist()
    assert results[8]["wire"] == x[0, 0, 1:5].astype("<f2").tobytes().hex()
    assert read_array(results[9]["out"])[0, 0].tolist() == (-x[0, 0].mean(axis=0)).tolist()
    assert read_array(results[9]["lse"]).tolist() == [[np.float32(np.log(8))]] * 2
    # 64 tokens of 8 channels: 2 bits a code and 2 bytes a token, K and V
    assert results[14]["wire_bytes"] == 2 * (64 * 2 + 64 * 2)


def test_the_process_answers_line_by_line():
    messages = [
        {"cmd": "begin", "flags": []},
        {"cmd": "step", "step": {"op": "create", "preset": "fp16", "geometry": GEOMETRY, "status": "OK"}},
        {"cmd": "begin"},
        {"cmd": "step", "step": {"op": "end_turn", "seq": "a"}},
        {"cmd": "step", "step": {"op": "dance"}},
        {"cmd": "end"},
    ]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "kvqref.exec"],
        input="\n".join(json.dumps(m) for m in messages),
        capture_output=True, text=True, check=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert replies[0] == replies[2] == replies[5] == {"ok": True}
    assert replies[1] == {"status": "OK", "result": {}}
    assert replies[3]["status"] == "INVALID", "begin forgets the cache"
    assert "error" in replies[4]
