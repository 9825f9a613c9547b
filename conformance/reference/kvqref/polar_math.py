"""The pinned polar functions of FORMATS section 2.4; every operation is one fp32 rounding."""

import json
from functools import cache
from importlib.resources import files

import numpy as np

from .fp import F32, f32_from_hex, hp, plus_zero


@cache
def _constants() -> dict:
    """data/polar.json: coefficient lists (lowest power first) and numbers, as float32."""
    data = json.loads((files(__package__) / "data" / "polar.json").read_text())
    return {
        name: [f32_from_hex(v) for v in value] if isinstance(value, list) else f32_from_hex(value)
        for name, value in data.items()
        if name not in ("about", "max_error")
    }


def _polynomial(name: str, t: np.ndarray) -> np.ndarray:
    """Horner from the highest power."""
    *rest, total = _constants()[name]
    for coefficient in reversed(rest):
        total = total * t + coefficient
    return total


def atan2p(v: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Angle of (u, v) in [0, 2 pi)."""
    k = _constants()
    mx, mn = np.maximum(np.abs(u), np.abs(v)), np.minimum(np.abs(u), np.abs(v))
    q = mn / np.where(mx == 0, F32(1), mx)
    r = q * _polynomial("atan", q * q)
    r = np.where(np.abs(v) > np.abs(u), k["half_pi"] - r, r)
    r = np.where(u < 0, k["pi"] - r, r)
    r = np.where(v < 0, k["two_pi"] - r, r)
    return np.where((r >= k["two_pi"]) | (mx == 0), F32(0), r)


def sincosp(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sinp and cosp of theta."""
    k = _constants()
    j = np.rint(theta * k["two_over_pi"])
    r = (theta - j * k["half_pi_hi"]) - j * k["half_pi_lo"]
    t = r * r
    s, c = r * _polynomial("sin", t), _polynomial("cos", t)
    quadrant = j.astype(np.int64) % 4
    return np.choose(quadrant, [s, c, -s, -c]), np.choose(quadrant, [c, -s, -c, s])


def to_polar(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rho and theta, rounded to fp16."""
    return plus_zero(hp(np.sqrt(u * u + v * v))), plus_zero(hp(atan2p(v, u)))


def from_polar(rho: np.ndarray, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u = rho*cosp(theta), v = rho*sinp(theta)."""
    sin, cos = sincosp(theta)
    return plus_zero(rho * cos), plus_zero(rho * sin)
