"""python3 -m kvqmutants [NAME]: the reference with the fault NAME, or the list of faults."""

import sys

from kvqref import exec as reference

from . import arithmetic, attention, codecs, policies, sequences  # noqa: F401  (they fill the table)
from .patch import TABLE, load_all


def main(arguments: list[str]) -> int:
    if not arguments:
        for m in TABLE.values():
            print(f"{m.name:32} {m.wrong}\n{'':32} caught by {m.test}")
        return 0
    load_all()
    TABLE[arguments[0]].apply()
    reference.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
