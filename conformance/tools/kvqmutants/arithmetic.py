"""Faults of arithmetic, rotation, packing and small floats (FORMATS sections 1 to 4)."""

import numpy as np

from kvqref import bits, fp, param_formats, rotation

from .patch import function, method, mutation

F32 = np.float32


@mutation("half-without-saturation", "values beyond 65504 become infinite", "codec-raw/entry/saturation")
def _():
    def hp(x):
        with np.errstate(over="ignore"):
            return np.asarray(x, F32).astype(np.float16).astype(F32)

    function("fp", "hp", lambda old: hp)


@mutation("half-truncates", "fp32 to fp16 rounds towards zero", "codec-raw/entry/fp32-ties")
def _():
    def truncated(old):
        def hp(x):
            x = np.asarray(x, F32)
            half = old(x)
            away = np.abs(half) > np.abs(x)
            return np.where(away, np.nextafter(half.astype(np.float16), np.float16(0)).astype(F32), half)

        return hp

    function("fp", "hp", truncated)


@mutation("minus-zero-kept", "-0 is stored and exported", "codec-raw/torture/raw-zeros")
def _():
    function("fp", "plus_zero", lambda old: lambda x: x)


@mutation("nan-accepted", "NaN and infinity enter", "codec-raw/entry/nan")
def _():
    function("fp", "entry", lambda old: lambda x: fp.plus_zero(fp.hp(np.nan_to_num(fp.to_f32(x), posinf=65504, neginf=-65504))))


@mutation("sum-from-left", "sums run from left to right instead of as a tree", "codec-lloyd/sums/D16-not-from-left")
def _():
    def tree(v):
        total = np.zeros(v.shape[:-1], F32)
        for i in range(v.shape[-1]):
            total = total + v[..., i]
        return total

    function("fp", "tree", lambda old: tree)


@mutation("half-rounds-up", "codes round halves up: floor(q + 0.5)", "codec-affine-channel/by-hand/half-to-even")
def _():
    def codes(x, s, z, levels):
        q = np.floor((x - z) / np.where(s == 0, F32(1), s) + F32(0.5))
        return np.where(s == 0, F32(0), np.clip(q, F32(0), np.asarray(levels, F32) - F32(1))).astype(np.uint8)

    function("affine", "affine_codes", lambda old: codes)


@mutation("reciprocal", "codes multiply by 1/s instead of dividing", "codec-affine-channel/ties/L5-odd-scale")
def _():
    def codes(x, s, z, levels):
        q = np.rint((x - z) * (F32(1) / np.where(s == 0, F32(1), s)))
        return np.where(s == 0, F32(0), np.clip(q, F32(0), np.asarray(levels, F32) - F32(1))).astype(np.uint8)

    function("affine", "affine_codes", lambda old: codes)


@mutation(
    "unrounded-scale",
    "codes are computed against s and z before they are rounded for storage",
    "codec-affine-channel/levels/L128-D16",
)
def _():
    method(param_formats.Fp16, "store", lambda old: lambda x: fp.plus_zero(np.asarray(x, F32)))


@mutation("code-not-clamped", "codes are not clamped to L - 1", "codec-affine-token/torture/L4-subnormals")
def _():
    def codes(x, s, z, levels):
        q = np.rint((x - z) / np.where(s == 0, F32(1), s))
        return np.where(s == 0, F32(0), q).astype(np.int64).astype(np.uint8) % np.asarray(levels, np.int64).astype(np.uint16)

    function("affine", "affine_codes", lambda old: codes)


@mutation("scale-floor", "a scale below 1e-6 is raised to 1e-6", "codec-affine-token/torture/L4-subnormals")
def _():
    def raised(old):
        def parameters(*args):
            s, z = old(*args)
            return np.maximum(s, fp.hp(F32(1e-6))), z

        return parameters

    function("affine", "affine_parameters", raised)


@mutation("range-over-levels", "the scale divides by L instead of L - 1", "codec-affine-token/levels/L4-D16-g16")
def _():
    function(
        "affine",
        "affine_parameters",
        lambda old: (
            lambda mn, mx, levels, midpoint, fmt: (old(mn, mx, levels, True, fmt)[0], old(mn, mx, levels, midpoint, fmt)[1])
        ),
    )


@mutation("midpoint-at-ends", "midpoint levels start at the minimum", "codec-affine-channel/by-hand/one-bit-midpoint")
def _():
    function(
        "affine",
        "affine_parameters",
        lambda old: (
            lambda mn, mx, levels, midpoint, fmt: (old(mn, mx, levels, midpoint, fmt)[0], old(mn, mx, levels, False, fmt)[1])
        ),
    )


@mutation("width-0-at-minimum", "a channel without bits decodes to its minimum", "codec-channel-widths/widths/all-0")
def _():
    def low(old):
        def parameters(mn, mx, levels, midpoint, fmt):
            s, z = old(mn, mx, levels, midpoint, fmt)
            return s, np.where(np.asarray(levels) == 1, fmt.store(mn), z)

        return parameters

    function("affine", "affine_parameters", low)


@mutation("difference-in-fp64", "x - z and its quotient are computed in fp64", "codec-affine-channel/ties/L4-lost-difference")
def _():
    def codes(x, s, z, levels):
        q = (np.float64(x) - np.float64(z)) / np.where(s == 0, F32(1), s)
        return np.where(s == 0, 0, np.clip(np.rint(q), 0, np.asarray(levels, np.float64) - 1)).astype(np.uint8)

    function("affine", "affine_codes", lambda old: codes)


@mutation("tie-to-higher-code", "a value on a threshold takes the higher code", "codec-lloyd/thresholds/L4-zero")
def _():
    def codes_of(old):
        def row_codes(x, y, book, scale, fmt):
            codes, h = old(x, y, book, scale, fmt)
            sigma = np.sqrt(fp.tree(x * x)) * fp.c(x.shape[1])
            return np.sum([y >= (t * sigma)[:, None] for t in book.thresholds], axis=0).astype(np.uint8), h

        return row_codes

    function("rows", "row_codes", codes_of)


@mutation(
    "thresholds-of-stored-scale",
    "thresholds are multiplied by sigma after it was rounded to fp16",
    "codec-lloyd/thresholds/L4-threshold-2-on",
)
def _():
    def codes_of(old):
        def row_codes(x, y, book, scale, fmt):
            codes, h = old(x, y, book, scale, fmt)
            sigma = fp.hp(np.sqrt(fp.tree(x * x)) * fp.c(x.shape[1]))
            return np.sum([y > (t * sigma)[:, None] for t in book.thresholds], axis=0).astype(np.uint8), h

        return row_codes

    function("rows", "row_codes", codes_of)


@mutation("scale-plain", "the default row scalar is sigma, not the one that keeps the norm", "codec-lloyd/levels/L4-D16")
def _():
    function(
        "rows",
        "_scalar",
        lambda old: lambda n, sigma, p, total, a, scale: old(n, sigma, p, total, a, "plain" if scale == "matched" else scale),
    )


@mutation("ls-as-unbiased", "scale=ls and scale=unbiased are taken for each other", "codec-lloyd/scale/ls-L4-D16")
def _():
    other = {"ls": "unbiased", "unbiased": "ls"}
    function(
        "rows", "_scalar", lambda old: lambda n, sigma, p, total, a, scale: old(n, sigma, p, total, a, other.get(scale, scale))
    )


@mutation(
    "signs-without-group", "every row of a head is rotated with the signs of group 0", "codec-width-groups/widths/D16-2-to-4"
)
def _():
    function("rotation", "signs", lambda old: lambda w, p, group, tensor, seed: old(w, p, 0, tensor, seed))


@mutation("signs-of-keys", "values are rotated with the signs of keys", "codec-lloyd/rotation/D16-values")
def _():
    function("rotation", "signs", lambda old: lambda w, p, group, tensor, seed: old(w, p, group, 0, seed))


@mutation("one-pass", "a head that is no power of two gets one rotation pass", "codec-lloyd/heads/L4-D80")
def _():
    function("rotation", "_passes", lambda old: lambda w: old(w)[:1])


@mutation(
    "second-pass-of-rest",
    "the second pass multiplies only the channels of its own butterfly by signs",
    "codec-lloyd/heads/L4-D96",
)
def _():
    def partial(old):
        def signs(w, p, group, tensor, seed):
            s = old(w, p, group, tensor, seed).copy()
            if p == 1:
                s[: w - (1 << (w.bit_length() - 1))] = 1
            return s

        return signs

    function("rotation", "signs", partial)


@mutation("inverse-in-order", "the inverse rotation runs pass 0 first", "codec-lloyd/heads/L4-D80")
def _():
    def unrotate(y, group, tensor, seed):
        x = y
        for q, first, p in rotation._passes(y.shape[1]):
            x = x.copy()
            rotation._butterfly(x, first, p)
            x = x * rotation.signs(y.shape[1], q, group, tensor, seed)
        return x

    function("rotation", "unrotate", lambda old: unrotate)


@mutation("distances-descending", "the butterfly runs distances p/2, ..., 2, 1", "codec-lloyd/levels/L16-D128")
def _():
    def butterfly(y, first, p):
        part = y[:, first : first + p]
        d = p // 2
        while d:
            v = part.reshape(len(y), p // (2 * d), 2, d)
            part = np.stack([v[:, :, 0] + v[:, :, 1], v[:, :, 0] - v[:, :, 1]], axis=2).reshape(len(y), p)
            d //= 2
        y[:, first : first + p] = part * fp.c(p)

    function("rotation", "_butterfly", lambda old: butterfly)


@mutation("most-significant-bit-first", "bit streams begin at the highest bit of a byte", "codec-affine-channel/by-hand/bytes")
def _():
    def reverse(data):
        return np.packbits(np.unpackbits(data, axis=-1, bitorder="little"), axis=-1, bitorder="big")

    function("bits", "pack", lambda old: lambda codes, levels: reverse(old(codes, levels)))
    function("bits", "unpack", lambda old: lambda data, n, levels: old(reverse(data), n, levels))


@mutation(
    "first-digit-highest", "the first code is the highest digit of a mixed-radix word", "codec-affine-channel/by-hand/base-3"
)
def _():
    function("bits", "_word_bits", lambda old: lambda digits, levels, width: old(digits[..., ::-1], levels, width))
    function("bits", "_digits", lambda old: lambda b, levels, count: old(b, levels, count)[..., ::-1])


@mutation("short-word-in-full", "a short last word takes the bits of a full one", "codec-affine-token/levels/L5-D80-g40")
def _():
    function("bits", "_short_bits", lambda old: lambda levels, digits: bits.WORDS[levels][1] if digits else 0)


@mutation("words-unchecked", "decoding accepts a word that no digits make", "codec-corrupt/words/L3-T3-full")
def _():
    def digits(b, levels, count):
        word = b.astype(np.int64) @ (np.int64(1) << np.arange(b.shape[-1], dtype=np.int64))
        return word[..., None] // levels ** np.arange(count, dtype=np.int64) % levels

    function("bits", "_digits", lambda old: digits)


@mutation("padding-unchecked", "decoding accepts padding bits that are set", "codec-corrupt/padding/lloyd")
def _():
    def unpack(old):
        def masked(data, n, levels):
            data = data.copy()
            keep = bits.stream_bits(n, levels)
            if keep % 8 and data.shape[1]:
                data[:, -1] &= (1 << keep % 8) - 1
            return old(data, n, levels)

        return masked

    function("bits", "unpack", unpack)


@mutation("zero-before-scale", "parameters are written z, s", "codec-affine-token/levels/L4-D16-g4")
def _():
    function("param_formats", "encode_affine", lambda old: lambda fmt, s, z: old(fmt, z, s))


@mutation("negative-scale-accepted", "decoding accepts a negative scale or -0", "codec-corrupt/parameters/affine-token-scale")
def _():
    def decode(fmt, data, shape):
        both = fmt.decode(data).reshape(shape + (2,))
        return both[..., 0], fp.plus_zero(both[..., 1])

    function("param_formats", "decode_affine", lambda old: decode)


@mutation("e4m3-through-fp16", "E4M3 parameters are rounded to fp16 first", "codec-channel-widths/e4m3-ties/no-fp16-between")
def _():
    method(param_formats.E4m3, "store", lambda old: lambda cls, x: old(cls, fp.hp(x)))


@mutation("e4m3-ties-away", "E4M3 ties go away from zero", "codec-channel-widths/e4m3-ties/normal")
def _():
    def nearest(table, x):
        x = x.astype(np.float64)
        low = np.clip(np.searchsorted(table, x, side="right") - 1, 0, len(table) - 2)
        return (low + (x >= (table[low] + table[low + 1]) / 2)).astype(np.uint8)

    function("param_formats", "_nearest_code", lambda old: nearest)


@mutation("e5m3-bias", "the exponent of E5M3 is off by one", "codec-lloyd/e5m3/matched-2^0")
def _():
    param_formats.E5m3.table = param_formats.E5m3.table * 2


@mutation("norm-after-rotation", "the row's norm is taken from the rotated row", "codec-lloyd/sums/D128-not-after-rotation")
def _():
    function("rows", "row_codes", lambda old: lambda x, y, book, scale, fmt: old(y, y, book, scale, fmt))
