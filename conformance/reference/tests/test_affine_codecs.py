"""Section 2.1 and the per-channel and per-token codecs, against numbers worked by hand."""

import struct

import numpy as np
import pytest

from kvqref import Head, KvqError, codec


def halves(*values):
    return np.array(values, "<f2").tobytes()


def test_four_bit_group_by_hand():
    # from 0 to 15 the scale is 1; 0.5, 1.5, 2.5 go to the even code
    x = np.array([0, 15, 0.5, 1.5, 2.5, 3.5, 7, 14.6])[:, None]
    wire = codec("affine-channel(levels=16,group=8)", Head(1)).encode(x)
    assert wire == bytes([0xF0, 0x20, 0x42, 0xF7]) + halves(1, 0)


def test_quotient_just_below_a_half_is_code_0():
    x = np.array([2.0**-24, 30, 1, 3])[:, None]
    wire = codec("affine-channel(levels=16,group=4)", Head(1)).encode(x)
    # scale hp(29.99.../15) = 2; (1 - 2^-24)/2 = 0.49999997 -> 0, (3 - 2^-24)/2 rounds to 1.5 or below -> 1 or 2
    assert wire[0] == 0xF0 and wire[1] & 15 == 0
    assert wire[2:] == halves(2, 2.0**-24)


def test_one_bit_midpoints():
    c = codec("affine-channel(levels=2,group=8,midpoint=1)", Head(2))
    x = np.array([[-3, 0], [5, 1], [-3, 0.5], [5, 0.51], [0, 0], [2, 1], [1, 0], [1.1, 0]])
    wire = c.encode(x)
    assert wire[2:] == halves(4, -1, 0.5, 0.25)
    # channel 0: (x + 1)/4 rounds half to even: 1 -> 0.5 -> code 0, 1.1 -> code 1
    assert wire[0] == 0b10101010
    # channel 1: 0.5 -> (0.25)/0.5 = 0.5 -> 0
    assert wire[1] == 0b00101010
    assert c.decode(wire, 8)[:, 0].tolist() == [-1, 3, -1, 3, -1, 3, -1, 3]


def test_midpoint_of_four_levels():
    # bins of [0, 8] are 2 wide, levels 1, 3, 5, 7
    c = codec("affine-channel(levels=4,group=4,midpoint=1)", Head(1))
    wire = c.encode(np.array([0, 8, 2.5, 6.5])[:, None])
    assert wire[1:] == halves(2, 1)
    assert c.decode(wire, 4)[:, 0].tolist() == [1, 7, 3, 7]


def test_constant_channel_is_exact_and_code_zero():
    for levels in (2, 4, 8, 16):
        for midpoint in (0, 1):
            c = codec(f"affine-channel(levels={levels},group=4,midpoint={midpoint})", Head(1))
            for value in (0, 1, -3.25, 100, -100, 6e4, 2.0**-24):
                wire = c.encode(np.full((4, 1), value))
                assert not any(wire[:-4]) and c.decode(wire, 4).tolist() == [[np.float16(value)]] * 4


def test_exact_powers_scale_without_a_floor():
    grid = np.random.default_rng(5).integers(-1024, 1025, (32, 4)) / 256
    grid[0], grid[1] = -4, 4
    for levels in (4, 8, 16):
        c = codec(f"affine-channel(levels={levels},group=32)", Head(4))
        base = c.encode(grid)
        for k in range(13):
            wire = c.encode(grid * 2.0**-k)
            assert wire[:-16] == base[:-16]
        assert np.array_equal(c.decode(c.encode(grid * 1024), 32), 1024 * c.decode(base, 32))


def test_scale_that_underflows_counts_as_constant():
    x = 2.0**-24 * np.arange(4)[:, None]
    c = codec("affine-channel(levels=16,group=4)", Head(1))
    # (3 * 2^-24) / 15 rounds to 0 in fp16
    assert c.encode(x) == bytes(2) + halves(0, 0)


def test_saturated_scale():
    x = np.array([-6e4, 6e4, -6e4, 6e4])[:, None]
    c = codec("affine-channel(levels=2,group=4)", Head(1))
    wire = c.encode(x)
    assert wire[1:] == halves(65504, -60000)
    assert c.decode(wire, 4)[:, 0].tolist() == [-60000, 5504, -60000, 5504]


def test_range_beyond_fp16_stays_within_half_a_step():
    x = np.array([-6e4, 6e4] * 16)[:, None]
    for levels in (2, 4, 8, 16):
        c = codec(f"affine-channel(levels={levels},group=32,midpoint={int(levels == 2)})", Head(1))
        error = np.abs(c.decode(c.encode(x), 32) - x.astype(np.float16).astype(float)).max()
        assert error <= 0.51 * 120000 / (levels - 1)


def test_groups_of_a_block_codes_first():
    c = codec("affine-channel(levels=2,group=3)", Head(2))
    x = np.array([[0, 5], [1, 5], [1, 6], [2, 0], [2, 0], [3, 1]])
    # group 0: channel 0 codes 0 1 1, channel 1 codes 0 0 1; group 1: 0 0 1 and 0 0 1
    expected = bytes([0b110, 0b100, 0b100, 0b100]) + halves(1, 0, 1, 5, 1, 2, 1, 0)
    assert c.encode(x) == expected
    assert c.size(6) == len(expected)


def test_affine_token_is_one_stream():
    c = codec("affine-token(levels=3,group=2)", Head(4))
    x = np.array([[0, 2, 1, 1], [-1, 1, 4, 8], [0, 1, 0, 2]])
    # codes: 0 2 0 0 | 0 2 0 2 | 0 2 0 2; words of 5 digits, 2 digits left in 4 bits
    codes = [0, 2, 0, 0, 0, 2, 0, 2, 0, 2, 0, 2]
    words = [sum(d * 3**i for i, d in enumerate(codes[j : j + 5])) for j in (0, 5)] + [codes[10] + 3 * codes[11]]
    expected = bytes(words) + halves(1, 0, 0, 1, 1, -1, 2, 4, 0.5, 0, 1, 0)
    assert c.encode(x) == expected
    assert c.decode(expected, 3).tolist() == x.tolist()


def test_affine_token_rotated_is_the_affine_row_of_y():
    c = codec("affine-token(levels=16,group=4,rotate=1)", Head(4))
    x = np.array([[1.0, 2, 3, 4]])
    from kvqref.rotation import DEFAULT_SEED, rotate

    y = rotate(x.astype(np.float32), 0, 0, DEFAULT_SEED)[0].astype(float)
    s, z = struct.unpack("<2e", c.encode(x)[2:])
    assert z == np.float16(y.min()) and s == np.float16((y.max() - y.min()) / 15)
    assert np.abs(c.decode(c.encode(x), 1) - x).max() < s + 0.01


def test_pair_mix_planes():
    # pairs of the half layout: (0, 2), (1, 3); pair 1 is salient
    c = codec("pair-mix(low=1,high=3,group=8,mask=02,midpoint=1)", Head(4))
    x = np.zeros((8, 4))
    x[:, 0] = [0, 0, 0, 0, 4, 4, 4, 4]
    x[:, 1] = range(8)
    x[:, 2] = [4, 0, 4, 0, 4, 0, 4, 0]
    x[:, 3] = range(7, -1, -1)
    low = [0b11110000, 0b10101010, 0b01010101, 0b01010101]
    # high plane: code >> 1 of 4 tokens a byte: 0 0 1 1 | 2 2 3 3 and 3 3 2 2 | 1 1 0 0
    high = [0b01010000, 0b11111010, 0b10101111, 0b00000101]
    expected = bytes(low + high) + halves(2, 1, 1, 0, 2, 1, 1, 0)
    assert c.encode(x) == expected
    assert c.decode(expected, 8)[:, 1].tolist() == list(range(8))
    assert c.decode(expected, 8)[:, 0].tolist() == [1] * 4 + [3] * 4


def test_pair_numbering_of_both_layouts(rng):
    x = rng.standard_normal((128, 128))
    mask = "20" + "00" * 7  # pair 5
    for layout, fine in (("adjacent", [10, 11]), ("half", [5, 69])):
        c = codec(f"pair-mix(low=1,high=3,group=128,midpoint=1,mask={mask})", Head(128, layout=layout))
        error = np.sqrt(((c.decode(c.encode(x), 128) - x) ** 2).mean(axis=0))
        assert sorted(np.argsort(error)[:2]) == fine


def test_rotary_part_and_the_rest():
    # channels 2..5 are rotary (half): (2, 4), (3, 5); then (0, 1), (6, 7)
    assert Head(8, rotary_dim=4, rotary_first=2).pairs().tolist() == [[2, 4], [3, 5], [0, 1], [6, 7]]
    assert Head(8, "k", "adjacent", 4, 2).pairs().tolist() == [[2, 3], [4, 5], [0, 1], [6, 7]]
    # values know no rotary part
    assert Head(8, "v", "half", 4, 2).pairs().tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for bad in (dict(rotary_dim=3), dict(rotary_dim=4, rotary_first=1), dict(rotary_dim=8, rotary_first=2), dict(rotary_dim=10)):
        with pytest.raises(KvqError, match="INVALID"):
            Head(8, **bad)
    with pytest.raises(KvqError, match="INVALID"):
        Head(8, rotary_first=2).pairs()
    with pytest.raises(KvqError, match="INVALID"):
        Head(7).pairs()


def test_channel_widths_runs():
    # pairs (0, 2) width 0 and (1, 3) width 1
    c = codec("channel-widths(bits=01,group=8,midpoint=1)", Head(4))
    x = np.zeros((8, 4))
    x[:, 0] = range(8)
    x[:, 1] = [0, 4] * 4
    x[:, 2] = -1
    x[:, 3] = [4, 0] * 4
    expected = bytes([0xAA, 0x55]) + halves(0, 3.5, 2, 1, 0, -1, 2, 1)
    assert c.encode(x) == expected
    assert c.decode(expected, 8)[0].tolist() == [3.5, 1, -1, 3]


def test_channel_widths_order_is_by_channel():
    c = codec("channel-widths(bits=2103,group=8,unit=channel)", Head(4))
    x = np.outer(np.arange(8), [1, 1, 1, 1.0])
    x[:, 1] = [0, 1] * 4
    wire = c.encode(x)
    # channel 0: 2 bits, 2 bytes; channel 1: 1 byte; channel 2: none; channel 3: 3 bytes of codes 0..7
    assert c.size(8) == len(wire) == 2 + 1 + 3 + 16
    assert wire[2] == 0xAA
    assert int.from_bytes(wire[3:6], "little") == sum(i << 3 * i for i in range(8))
    assert wire[6:] == halves(7 / 3, 0, 1, 0, 0, 3.5, 1, 0)


def test_channel_widths_e4m3_parameters():
    c = codec("channel-widths(bits=2222,group=8,unit=channel,params=e4m3)", Head(4))
    x = np.zeros((8, 4))
    x[:, 0] = [921 + d for d in (-3, 3, 0, 0, 0, 0, 0, 0)]
    x[:, 1] = np.linspace(-5000, 5000, 8)
    x[:, 2] = [0, 3] * 4
    x[:, 3] = [-0.5, 1] * 4
    wire = c.encode(x)
    # 918 saturates at 448 (0x7E), s = 2; range 10000: s = 448, z = -448; 1, 0; 0.5, -0.5
    assert wire[8:] == bytes([0x40, 0x7E, 0x7E, 0xFE, 0x38, 0x00, 0x30, 0xB0])
    assert wire[0:2] == b"\xff\xff"
    assert (c.decode(wire, 8)[:, 0] == 448 + 3 * 2).all()


def test_kitty_block_by_hand():
    c = codec("kitty(boost=1/4,group=4)", Head(4))
    x = np.array([[0, 15, 1, 0], [3, 0, 1, 1], [1, 5, 1, 2], [2, 10, 1, 3.0]])
    # channel 1 is boosted: codes 15 0 5 10; the others have 4 levels, channel 2 is constant
    low = [0b10011100, 0b10010011, 0, 0b11100100]
    high = [0b10010011]
    expected = bytes(low + high + [0xFF, 0, 0xFF, 0xFF]) + halves(1, 0, 1, 0, 0, 1, 1, 0)
    assert c.encode(x) == expected
    assert c.decode(expected, 4).tolist() == x.tolist()


def test_kitty_chooses_by_group(rng):
    c = codec("kitty(boost=1/32,group=32)", Head(128))
    x = rng.standard_normal((64, 128))
    x[:32, 7] *= 50
    x[32:, 90] *= 50
    wire = c.encode(x)
    per_group = 128 * 8 + 4 * 8 + 128
    positions = [np.frombuffer(wire[g * per_group + 128 * 8 + 4 * 8 :][:128], np.uint8) for g in (0, 1)]
    assert [sorted(p[p != 255]) for p in positions] == [[0, 1, 2, 3]] * 2
    assert positions[0][7] != 255 and positions[0][90] == 255 and positions[1][90] != 255 and positions[1][7] == 255


CORRUPT = [
    ("affine-channel(levels=3,group=2)", 1, 2, b"\x09" + halves(1, 0)),  # 2 digits below 9
    ("affine-channel(levels=2,group=2)", 1, 2, b"\x04" + halves(1, 0)),  # padding
    ("affine-channel(levels=2,group=2)", 1, 2, b"\x00" + halves(1, 0) + b"\x00"),  # size
    ("affine-channel(levels=2,group=2)", 1, 2, b"\x00" + halves(-1, 0)),
    ("affine-channel(levels=2,group=2)", 1, 2, b"\x00" + halves(-0.0, 0)),
    ("affine-channel(levels=2,group=2)", 1, 2, b"\x00" + halves(np.inf, 0)),
    ("affine-channel(levels=2,group=2)", 1, 2, b"\x00" + halves(1, np.nan)),
    ("affine-token(levels=2,group=1)", 1, 1, b"\x02" + halves(1, 0)),
    ("raw", 1, 1, halves(np.inf)),
    ("channel-widths(bits=00,group=8,unit=channel)", 2, 8, halves(0, 1, 1, 1)),
    ("channel-widths(bits=00,group=8,unit=channel,params=e4m3)", 2, 8, b"\x00\x00\x00\x7f"),
    ("channel-widths(bits=00,group=8,unit=channel,params=e4m3)", 2, 8, b"\x80\x00\x00\x00"),
    ("kitty(boost=1/2,group=4)", 2, 4, bytes(2 + 1) + b"\x00\x00" + halves(0, 0, 0, 0)),
    ("kitty(boost=1/2,group=4)", 2, 4, bytes(2 + 1) + b"\xff\xff" + halves(0, 0, 0, 0)),
    ("kitty(boost=1/2,group=4)", 2, 4, bytes(2 + 1) + b"\xff\x01" + halves(0, 0, 0, 0)),
    ("lloyd(levels=2)", 1, 1, b"\x01" + halves(-1)),
    ("lloyd(levels=2)", 1, 1, b"\x01" + halves(-0.0)),
    ("progressive(bits=2)", 1, 1, b"\x10" + halves(1, 0)),
]


@pytest.mark.parametrize("text, dim, tokens, wire", CORRUPT)
def test_corrupt_bytes_are_refused(text, dim, tokens, wire):
    with pytest.raises(KvqError, match="CORRUPT"):
        codec(text, Head(dim)).decode(wire, tokens)


def test_negative_zero_of_z_and_raw_values_is_read_as_zero():
    z = codec("affine-channel(levels=2,group=2)", Head(1)).decode(b"\x00" + halves(1, -0.0), 2)
    raw = codec("raw", Head(1)).decode(halves(-0.0), 1)
    assert not np.signbit(z).any() and not np.signbit(raw).any()


INVALID = [
    ("affine-channel(levels=9,group=8)", 8),
    ("affine-channel(levels=4)", 8),
    ("affine-channel(levels=4,group=0)", 8),
    ("affine-channel(levels=4,group=8,midpoint=2)", 8),
    ("affine-channel(levels=4,group=8,levels=4)", 8),
    ("affine-channel(levels=4,group=8,rotate=1)", 8),
    ("affine-channel(levels=4, group=8)", 8),
    ("affine-channel(levels=+4,group=8)", 8),
    ("affine-token(levels=4,group=32)", 80),
    ("affine-token(levels=4,group=8,scale=ls)", 8),
    ("pair-mix(low=1,high=3,group=4,mask=00)", 8),
    ("pair-mix(low=1,high=4,group=8,mask=00)", 8),
    ("pair-mix(low=1,high=3,group=8)", 8),
    ("pair-mix(low=1,high=3,group=8,mask=10)", 8),
    ("pair-mix(low=1,high=3,group=8,mask=0000)", 8),
    ("pair-mix(low=1,high=3,group=8,mask=0)", 8),
    ("pair-mix(low=1,high=3,group=8,mask=00)", 7),
    ("width-groups(bits=333)", 8),
    ("width-groups(bits=3330)", 8),
    ("width-groups(bits=3339)", 8),
    ("width-groups(bits=333)", 7),
    ("channel-widths(bits=3339,group=8)", 8),
    ("channel-widths(bits=3333,group=12)", 8),
    ("channel-widths(bits=3333,group=8,params=e5m3)", 8),
    ("channel-split(high=8,low=4,mask=0000)", 8),
    ("kitty(boost=1/32,group=6)", 8),
    ("kitty(boost=2,group=4)", 8),
    ("kitty(boost=1/0,group=4)", 8),
    ("kitty(boost=1,group=4)", 256),
    ("lloyd(levels=9)", 8),
    ("lloyd(levels=4,scale=best)", 8),
    ("progressive(bits=3)", 8),
    ("polar(radius=4,angle=4,group=8)", 7),
    ("raw(bits=4)", 8),
    ("nothing", 8),
    ("lloyd(levels=4", 8),
    ("", 8),
]


@pytest.mark.parametrize("text, dim", INVALID)
def test_texts_that_mean_nothing(text, dim):
    with pytest.raises(KvqError, match="INVALID"):
        codec(text, Head(dim))


def test_tokens_must_fill_groups():
    with pytest.raises(KvqError, match="INVALID"):
        codec("affine-channel(levels=4,group=8)", Head(4)).encode(np.zeros((12, 4)))


def test_odd_heads_are_fine_without_pairs(rng):
    x = rng.standard_normal((8, 65))
    for text in ("raw", "affine-channel(levels=4,group=8)", "affine-token(levels=4,group=13)", "lloyd(levels=4)"):
        c = codec(text, Head(65))
        assert c.decode(c.encode(x), 8).shape == (8, 65)


AFFINE_TABLE = {2: (0.641, 0.784), 3: (0.587, 0.728), 4: (0.393, 0.500), 5: (0.294, 0.374), 6: (0.235, 0.299),
                7: (0.196, 0.249), 8: (0.168, 0.214), 16: (0.078, 0.100)}  # fmt: skip


@pytest.mark.parametrize("levels", sorted(AFFINE_TABLE))
def test_error_table(levels, rng):
    x = rng.standard_normal((4096, 128)).astype(np.float16).astype(float)
    for group, expected in zip((32, 128), AFFINE_TABLE[levels]):
        c = codec(f"affine-channel(levels={levels},group={group},midpoint={int(levels == 2)})", Head(128))
        error = np.sqrt(((c.decode(c.encode(x), 4096) - x) ** 2).sum() / (x**2).sum())
        assert error == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("group, middle, ends", [(32, 0.411, 1.963), (128, 0.614, 3.562)])
def test_midpoint_energy_of_one_bit(group, middle, ends, rng):
    x = rng.standard_normal((4096, 128)).astype(np.float16).astype(float)
    for midpoint, expected in ((1, middle), (0, ends)):
        c = codec(f"affine-channel(levels=2,group={group},midpoint={midpoint})", Head(128))
        energy = ((c.decode(c.encode(x), 4096) - x) ** 2).sum() / (x**2).sum()
        assert energy == pytest.approx(expected, rel=0.03)
