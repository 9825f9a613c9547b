"""Vectors of n values that have broken quantizers: each function gives [count][n], ready to be rows or columns."""

import numpy as np

from .data import Stream

SMALLEST = 2.0**-24  # fp16's smallest subnormal


def constants(n: int) -> np.ndarray:
    """Range 0: every code is 0 and the value is the stored zero."""
    values = [0.0, SMALLEST, 0.01, 1.0, -3.25, 100.0, -100.0, 6e4, -65504.0]
    return np.repeat(np.array(values)[:, None], n, axis=1)


def zeros(n: int) -> np.ndarray:
    """+0, -0 and both; -0 never survives."""
    ramp = np.arange(n)
    return np.stack([np.zeros(n), np.full(n, -0.0), np.where(ramp % 2, -0.0, 0.0), np.where(ramp == n - 1, -1.0, -0.0)])


def subnormals(n: int) -> np.ndarray:
    """Multiples of 2^-24: no flush to zero; a scale that underflows counts as constant."""
    ramp = np.arange(n)
    single = np.zeros(n)
    single[n // 2] = SMALLEST
    rows = [
        SMALLEST * (ramp - n // 2),
        SMALLEST * (ramp % 2),
        SMALLEST * (ramp % 3),
        1 + ramp * 1e-8,
        single,
        -SMALLEST * (ramp % 5),
    ]
    return np.stack(rows)


def extremes(n: int) -> np.ndarray:
    """Ranges beyond fp16, alternating signs, and inputs beyond +-65504 (they saturate)."""
    ramp = np.arange(n)
    sign = np.where(ramp % 2, -1.0, 1.0)
    return np.stack([6e4 * sign, 65504 * sign, 7e4 * sign, 65519.0 - ramp, np.where(ramp == 0, 125000.0, ramp % 5 - 1.0), sign])


def outliers(n: int) -> np.ndarray:
    """One value apart from the others: large, negative, or one fp16 step."""
    rows = np.stack([np.full(n, 100.0), np.zeros(n), np.full(n, -0.5), np.linspace(-1, 1, n)])
    rows[0, n - 1], rows[1, n // 2], rows[2, 0], rows[3, n // 3] = 100.0625, 3e4, -200.0, 921.0
    return rows


def offsets(n: int) -> np.ndarray:
    """A spread that is small against its offset, as biased keys have."""
    noise = Stream(71).uniform(4, n)
    return noise * np.array([3.0, 0.05, 1.0, 20.0])[:, None] + np.array([921.0, 921.0, -350.0, 30000.0])[:, None]


def wide(n: int) -> np.ndarray:
    """fp16 values of all magnitudes at once."""
    return Stream(72).halves(5, n)


def half_ties(n: int, levels: int) -> np.ndarray:
    """Scale a power of two and values exactly between two levels: ties go to the even code."""
    steps = np.clip(np.arange(n) - 0.5, 0, levels - 1)
    steps[-1] = levels - 1
    return np.stack([steps, steps * 2.0**-6 - 1, -steps * 4, steps[::-1] * 0.125])


def middle_ties(n: int, levels: int) -> np.ndarray:
    """The same for levels at bin middles: minimum 0, maximum `levels`, values at the edges of bins."""
    edges = np.clip(np.arange(n), 0, levels).astype(np.float64)
    edges[-1] = levels
    return np.stack([edges, edges * 2.0**-6 - 1, -edges * 4, edges[::-1] * 0.125])


def odd_ties(n: int, levels: int) -> np.ndarray:
    """Exact halves of a scale that is no power of two: a product with 1/s falls beside the half, the division does not."""
    rows = []
    for s in range(3, 2048, 2):
        if (levels - 1) * s > 2048:
            break
        values = (np.arange(levels - 1) + 0.5) * s
        exact = values[values == np.float64(np.float16(values))].astype(np.float32)
        beside = np.rint(exact * (np.float32(1) / np.float32(s))) != np.rint(exact / np.float32(s))
        if beside.any() and len(rows) < 4:
            rows.append(np.resize(exact[beside], n))
            rows[-1][[0, -1]] = 0, (levels - 1) * s
    return np.array(rows, np.float64).reshape(-1, n)


def near_ties(n: int, levels: int, count: int = 4) -> np.ndarray:
    """Quotients within two fp32 steps of a half, on either side: parameters that are not rounded give other codes."""
    stream, found = Stream(73), []
    while len(found) < count:
        low, high = np.sort(np.abs(stream.halves(2, 4096)) % 8, axis=0).astype(np.float32)
        step = stream.words(4096) % np.uint64(levels - 1)
        s = np.float32(np.float16((high - low) / np.float32(levels - 1)))
        x = np.float32(np.float16(low + (step + 0.5) * s))
        with np.errstate(divide="ignore", invalid="ignore"):
            q = (x - low) / s
            distance = np.abs(q - np.floor(q) - np.float32(0.5))
        good = (s > 0) & (distance <= 2 * np.spacing(q)) & (distance > 0) & (low < x) & (x < high)
        found += [(low[i], x[i], high[i]) for i in np.flatnonzero(good)]
    rows = np.zeros((count, n))
    for row, (low, x, high) in zip(rows, found):
        row[:] = x
        row[0], row[-1] = low, high
    return rows


def lost_differences(levels: int) -> np.ndarray:
    """x - z with z = 2^-24 is x in fp32 and lies on a half; the exact difference lies below it, where the even code is above."""
    s = 128.0
    values = (np.arange(levels - 1) + 0.5) * s
    values = values[(values == np.float64(np.float16(values))) & (np.arange(levels - 1) % 2 == 1)]
    return np.array([[SMALLEST, *np.resize(values, 2), (levels - 1) * s]])


def tree_sum(v: np.ndarray) -> np.ndarray:
    """Section 1.3 over the last axis, in fp32."""
    size = 1 << (v.shape[-1] - 1).bit_length()
    v = np.concatenate([v, np.zeros((*v.shape[:-1], size - v.shape[-1]), np.float32)], axis=-1)
    while v.shape[-1] > 1:
        v = v[..., ::2] + v[..., 1::2]
    return v[..., 0]


def telling_norms(width: int, other, count: int = 2) -> np.ndarray:
    """Rows whose norm, rounded to fp16 as scale=plain stores it, shows another way to sum the squares.

    other(x) gives those squares' sum in fp32 for rows x [n][width]."""
    stream, found = Stream(75 + width), []
    factor = np.float32(1 / np.sqrt(np.float64(width)))
    for _ in range(300):
        x = np.float32(np.float16(3 * stream.uniform((1 << 16) // width, width)))
        right, wrong = (np.float16(np.sqrt(total) * factor) for total in (tree_sum(x * x), other(x)))
        found += list(x[right != wrong])
        if len(found) >= count:
            return np.array(found[:count], np.float64)
    raise AssertionError(f"no row of {width} values tells the sums apart")


PLAIN = {
    "constants": constants,
    "zeros": zeros,
    "subnormals": subnormals,
    "extremes": extremes,
    "outliers": outliers,
    "offsets": offsets,
    "wide": wide,
}


def threshold_rows(threshold: float, levels_count: int, count: int = 3) -> dict[str, np.ndarray]:
    """Rows of 4 values, unrotated, whose first value lies exactly on a threshold of a book, or one fp32 step beside it.

    sigma is the fp32 norm times 1/2, the threshold t * sigma in fp32 (section 2.2)."""
    t = np.float32(threshold)
    stream = Stream(1000 + levels_count)
    found: dict[str, list] = {"on": [], "below": [], "above": []}
    for _ in range(4000):
        if all(len(rows) >= count for rows in found.values()):
            break
        rest = (np.abs(stream.halves(8192, 3)) % 4).astype(np.float32)
        energy = (rest.astype(np.float64) ** 2).sum(axis=1)
        share = np.float64(t) ** 2 / 4
        if share >= 1:
            break
        first = np.sign(t) * np.sqrt(share * energy / (1 - share))
        first = first.astype(np.float16).astype(np.float32)
        row = np.concatenate([first[:, None], rest], axis=1)
        square = row * row
        sigma = np.sqrt((square[:, 0] + square[:, 1]) + (square[:, 2] + square[:, 3])) * np.float32(0.5)
        edge = t * sigma
        step = np.spacing(np.abs(edge))
        for name, hit in (("on", first == edge), ("below", first == edge - step), ("above", first == edge + step)):
            hit &= (sigma > 2.0**-10) & (first != 0)
            found[name] += list(row[hit])
    return {name: np.array(rows[:count], np.float64) for name, rows in found.items() if rows}
