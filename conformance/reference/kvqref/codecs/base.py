"""What every codec of FORMATS section 5 can do.

A `Block` is the content of one block before it becomes bytes: the codes of its tokens and the
parameters, one entry per token (row codecs) or per token group (per-channel codecs).
"""

from dataclasses import dataclass

import numpy as np

from ..errors import intact, require
from ..fp import entry
from ..head import Head
from ..param_formats import E5m3, Fp16
from ..rotation import DEFAULT_SEED
from ..text import Arguments


@dataclass(frozen=True)
class Block:
    codes: np.ndarray  # [tokens, ...]
    params: tuple[np.ndarray, ...]  # each [tokens or groups, ...]

    @property
    def tokens(self) -> int:
        return len(self.codes)


class Codec:
    """Base of all codecs. Subclasses set `head` and implement quantize, values, size, to_wire, from_wire."""

    head: Head
    group: int | None = None  # tokens per group of a per-channel codec; None for a row codec
    center = False

    def quantize(self, x: np.ndarray, mu: np.ndarray | None) -> Block:
        """Entered rows [tokens, dim] -> codes and parameters."""
        raise NotImplementedError

    def values(self, block: Block, mu: np.ndarray | None) -> np.ndarray:
        """float32 [tokens, dim]."""
        raise NotImplementedError

    def size(self, tokens: int) -> int:
        """Wire bytes of a block."""
        raise NotImplementedError

    def to_wire(self, block: Block) -> bytes:
        raise NotImplementedError

    def from_wire(self, data: bytes, tokens: int) -> Block:
        raise NotImplementedError

    def encode(self, x, mu=None) -> bytes:
        """Stateless encode: any float array [tokens, dim] -> wire bytes."""
        x = np.asarray(x)
        require(x.ndim == 2 and x.shape[1] == self.head.dim, f"x must be [tokens][{self.head.dim}]")
        self._check_tokens(len(x))
        return self.to_wire(self.quantize(entry(x), self._entered_mean(mu)))

    def decode(self, data: bytes, tokens: int, mu=None) -> np.ndarray:
        """Stateless decode: wire bytes -> float32 [tokens, dim]."""
        require(tokens >= 0, "negative token count")
        self._check_tokens(tokens)
        mu = self._entered_mean(mu)
        intact(len(data) == self.size(tokens), f"{len(data)} bytes, not {self.size(tokens)}")
        return self.values(self.from_wire(data, tokens), mu)

    def cut(self, block: Block, valid: int) -> Block:
        """What truncation to `valid` tokens leaves (FORMATS section 7)."""
        if self.group is None:
            return Block(block.codes[:valid], tuple(p[:valid] for p in block.params))
        groups = -(-valid // self.group)
        codes = block.codes[: groups * self.group].copy()
        codes[valid:] = 0
        return Block(codes, tuple(p[:groups] for p in block.params))

    def _check_tokens(self, tokens: int) -> None:
        whole = self.group is None or tokens % self.group == 0
        require(whole, f"{tokens} tokens are no whole groups of {self.group}")

    def _entered_mean(self, mu) -> np.ndarray | None:
        if not self.center:
            return None
        require(mu is not None and np.shape(mu) == (self.head.dim,), f"center=1 needs mu [{self.head.dim}]")
        return entry(mu)


@dataclass(frozen=True)
class RowOptions:
    """The keys that rotating codecs share (FORMATS section 5)."""

    seed: int
    rotate: bool
    center: bool

    @staticmethod
    def take(args: Arguments, head: Head, rotate_default: int) -> "RowOptions":
        center = args.flag("center")
        require(not center or head.tensor == "k", "center=1 is for keys")
        return RowOptions(args.integer("seed", DEFAULT_SEED), args.flag("rotate", rotate_default), center)


def take_row_format(args: Arguments):
    """params=e5m3, else fp16."""
    return E5m3 if args.choice("params", ("e5m3",), None) else Fp16


def centered(x: np.ndarray, mu: np.ndarray | None) -> np.ndarray:
    """x - mu in fp32 (section 2.2)."""
    return x if mu is None else x - mu


def uncentered(x: np.ndarray, mu: np.ndarray | None) -> np.ndarray:
    """mu is added last."""
    return x if mu is None else x + mu
