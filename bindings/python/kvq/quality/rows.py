"""What is measured: a table of recipes, what is already known about them, and what must hold."""

from dataclasses import dataclass

import kvq
from kvq.lab.accounting import LONG
from kvq.lab.text import WINDOW

TQ_VALUES = "v=lloyd(levels={},scale=unbiased)"
SCALARS = (
    "SemKV on TQ 4/3, unbiased scalars",
    "keys had matched scalars then and values unbiased ones, a token class here has one codec for both",
)
PAGES = "block=128"  # the earlier measurement packed pages of 128 tokens whatever the recipe


@dataclass(frozen=True)
class Known:
    """What an independent numpy implementation measured on the same tokens, with standard errors."""

    kl: float
    kl_error: float
    ppl_ratio: float
    ppl_ratio_error: float
    between: tuple[str, str] | None = None  # not this row itself, but between it and the one of this name; why


@dataclass(frozen=True)
class Row:
    """One recipe."""

    name: str  # for tables
    recipe: str
    calibrated: bool = False  # the policy is decided on the calibration windows instead of the prompt
    profile: str = ""  # function of profiles.py that gives what the recipe needs beside its text
    length: int = LONG  # tokens at which its bits are counted
    known: Known | None = None


def presets():
    """One row per preset of the library."""
    special = {
        "chanmix": Row("chanmix", "chanmix", profile="chanmix"),
        "pmkvq": Row("pmkvq", "pmkvq", profile="pmkvq", length=WINDOW),  # its width falls with the length
    }
    return [special.get(name) or Row(name, name, calibrated=name.startswith("blockgtq")) for name in kvq.presets()]


def anchors():
    """The recipes of the papers and ours as they were measured before."""

    def early(preset, levels, widths):
        """Our recipe as it was measured first: widths pair by pair, unbiased values, no recent window."""
        return f"{preset};v=lloyd(levels={levels},scale=unbiased,params=e5m3);recent=0;policy=pair-widths(avg={widths})"

    affine, tq, mixed = "affine-channel(levels=4,group=64)", "lloyd(levels={})", "pair-mix(low=1,high=3,group=128,midpoint=1)"
    return [
        Row("KIVI-2, G = 64", f"k={affine};v=affine-token(levels=4,group=64);{PAGES}", known=Known(0.298, 0.014, 1.369, 0.024)),
        Row("SemKV on TQ 4/3, r = 3/4", "semkv-tq-2", known=Known(0.297, 0.012, 1.377, 0.035, SCALARS)),
        Row(
            SCALARS[0],
            "policy=semkv(r=3/4,low=lloyd(levels=3,scale=unbiased),high=lloyd(levels=4,scale=unbiased))",
        ),
        Row("TQ K2V2", f"k={tq.format(4)};{TQ_VALUES.format(4)};{PAGES}", known=Known(0.188, 0.013, 1.232, 0.029)),
        Row(
            "TQ K2V2, 4 sinks, centred keys",
            f"k=lloyd(levels=4,center=1);{TQ_VALUES.format(4)};sinks=4;{PAGES}",
            known=Known(0.065, 0.006, 1.063, 0.012),
        ),
        Row(
            "PN-Mix keys, TQ values",
            f"k={mixed};{TQ_VALUES.format(4)};sinks=32;{PAGES};policy=pnmix(r=1/2)",
            known=Known(0.053, 0.004, 1.053, 0.012),
        ),
        Row(
            "Block-GTQ K2V2, 4 sinks",
            f"blockgtq-k2v2;{TQ_VALUES.format(4)};sinks=4;{PAGES}",
            calibrated=True,
            known=Known(0.044, 0.004, 1.040, 0.008),
        ),
        Row(
            "Block-GTQ K3V3, 4 sinks",
            f"blockgtq-k3v3;{TQ_VALUES.format(8)};sinks=4;{PAGES}",
            calibrated=True,
            known=Known(0.0082, 0.0007, 1.007, 0.004),
        ),
        Row("like kvq-2", early("kvq-2", 3, "2,bmin=1,bmax=4,score=q-var"), known=Known(0.037, 0.003, 1.038, 0.009)),
        Row("like kvq-2.5", early("kvq-2.5", 4, "21/8,bmin=0,bmax=6,score=q-range"), known=Known(0.0147, 0.0011, 1.018, 0.004)),
        Row("like kvq-3", early("kvq-3", 6, "3,bmin=0,bmax=6,score=q-range"), known=Known(0.0072, 0.0006, 1.010, 0.003)),
    ]


def variants():
    """What a sink, a recent window, centring, a level at bin middles or another score changes."""
    keys_only = f"v=raw;sinks=32;{PAGES}"
    mixed = "k=pair-mix(low=1,high=3,group=128{})"

    def pnmix(criterion, unit=""):
        return f"{mixed.format(',midpoint=1' + unit)};{keys_only};policy=pnmix(r=1/2,criterion={criterion})"

    return [
        Row("tq-2, 4 sinks", "tq-2;sinks=4"),
        Row("tq-2c, recent 0", "tq-2c;recent=0"),
        Row("kvq-2, recent 0", "kvq-2;recent=0"),
        Row("kvq-2.5, recent 0", "kvq-2.5;recent=0"),
        Row("kvq-3, recent 0", "kvq-3;recent=0"),
        Row("kvq-2, 4 sinks", "kvq-2;sinks=4"),
        Row("kvq-2, recent 96", "kvq-2;recent=96"),
        Row("kvq-2, score q-geo", "kvq-2;policy=pair-widths(avg=2,bmin=1,bmax=4,score=q-geo,unit=fit16)"),
        Row("kvq-3, score q-range", "kvq-3;policy=pair-widths(avg=3,bmin=0,bmax=6,score=q-range,unit=fit16)"),
        Row(
            "rotated affine rows, 4 levels", "k=affine-token(levels=4,group=D,rotate=1);v=affine-token(levels=4,group=D,rotate=1)"
        ),
        Row("PN-Mix keys, qk", pnmix("qk-pair")),
        Row("PN-Mix keys, k", pnmix("k-pair")),
        Row("PN-Mix keys, magnitude", pnmix("k-magnitude", ",unit=channel")),
        Row("PN-Mix keys, range", pnmix("k-range", ",unit=channel")),
        Row("PN-Mix keys, arbitrary mask", f"{mixed.format(',midpoint=1,mask=5ac61e8b')};{keys_only}"),
        Row("PN-Mix keys, no midpoint", f"{mixed.format('')};{keys_only};policy=pnmix(r=1/2)"),
        Row("Kitty keys", f"k=kitty(boost=1/16,group=128);{keys_only}"),
        Row("KIVI keys", f"k=affine-channel(levels=4,group=128);{keys_only}"),
        Row("KIVI keys, levels at bin middles", f"k=affine-channel(levels=4,group=128,midpoint=1);{keys_only}"),
    ]


def all_rows():
    """Every row, each recipe once per name."""
    return [*presets(), *anchors(), *variants()]


# Largest KL and perplexity ratio that a preset may have.
TARGETS = {"kvq-2": (0.045, 1.05), "kvq-2.5": (0.020, 1.025), "kvq-3": (0.010, 1.015)}

# Chains of rows from the smallest KL to the largest.  A step counts as kept unless it is reversed by more than two standard
# errors of the paired difference.
ORDERS = {
    "PN-Mix's criterion": (
        "PN-Mix keys, qk",
        "PN-Mix keys, k",
        "PN-Mix keys, magnitude",
        "PN-Mix keys, range",
        "PN-Mix keys, arbitrary mask",
    ),
    "PN-Mix's midpoint": ("PN-Mix keys, qk", "PN-Mix keys, no midpoint"),
    "PN-Mix, Kitty, KIVI": ("PN-Mix keys, qk", "Kitty keys", "KIVI keys"),
    "TQ below affine rows at equal levels": ("tq-2", "rotated affine rows, 4 levels"),
    "Block-GTQ below TQ at equal code bits": ("blockgtq-k2v2", "tq-2"),
}
