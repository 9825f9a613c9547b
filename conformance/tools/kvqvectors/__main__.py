"""python3 -m kvqvectors write | check | publish: the only way vectors are made.

write    generate conformance/vectors/v1 (refused once it is published)
check    exit 1 and name the files if the committed set is not what would be written
publish  mark the set as published
"""

import sys

from . import (
    accounting,
    attention,
    codecs_channel,
    codecs_refusals,
    codecs_row,
    policies,
    policies_widths,
    sequences,
    sequences_life,
    sequences_presets,
    trace,
)
from .script import Suite
from .writer import built, differences, publish, write

MODULES = (
    codecs_channel,
    codecs_row,
    codecs_refusals,
    policies,
    policies_widths,
    accounting,
    sequences,
    sequences_life,
    sequences_presets,
    attention,
    trace,
)


def all_suites() -> list[Suite]:
    return [suite for module in MODULES for suite in module.suites()]


def main(arguments: list[str]) -> int:
    if arguments == ["publish"]:
        publish()
        return 0
    if arguments not in (["write"], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    files = built(all_suites())
    if arguments == ["write"]:
        write(files)
        print(files["manifest.json"].split('"files"')[0])
        return 0
    wrong = differences(files)
    for name in wrong:
        print(f"{name} is not what the tool writes")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
