"""Checks of the binary interface.

abi.py generate HEADER OUT.c      write a program that prints constants, layouts and prototypes
abi.py golden PROGRAM GOLDEN      compare what it prints with the golden table (KVQ_UPDATE_GOLDEN=1 writes the table)
abi.py symbols LIBRARY HEADER     compare the library's exported symbols with the functions that the header declares
"""

import difflib
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import kvq_header  # noqa: E402


def generate(header, out):
    text = pathlib.Path(header).read_text()
    lines = [f'  printf("%-24s %lld\\n", "{name}", (long long)({name}));' for name in kvq_header.constants(text)]
    for struct in kvq_header.structs(text):
        lines.append(f'  printf("\\nstruct %s: %zu bytes\\n", "{struct.name}", sizeof({struct.name}));')
        for field in struct.fields:
            place = f"offsetof({struct.name}, {field.name}), sizeof((({struct.name} *)0)->{field.name})"
            lines.append(f'  printf("  %4zu %4zu  %-20s %s\\n", {place}, "{field.name}", "{field.type}");')
    lines.append('  printf("\\n");')
    for function in kvq_header.functions(text):
        parameters = ", ".join(p.type for p in function.parameters) or "void"
        lines.append(f'  printf("%s\\n", "{function.returns} {function.name}({parameters})");')
    body = "\n".join(lines)
    pathlib.Path(out).write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n\n#include "kvq/kvq.h"\n\nint main(void) {{\n{body}\n  return 0;\n}}\n'
    )


def golden(program, table):
    seen = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    if os.environ.get("KVQ_UPDATE_GOLDEN"):
        pathlib.Path(table).write_text(seen)
    expected = pathlib.Path(table).read_text()
    sys.stdout.writelines(difflib.unified_diff(expected.splitlines(True), seen.splitlines(True), table, "kvq.h as compiled"))
    if seen != expected:
        sys.exit("the interface differs from golden.txt: released constants, structs and functions never change")


def symbols(library, header):
    listing = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    exported = {line.split()[-1].split("@")[0] for line in listing.splitlines()} - {"KVQ_1"}
    declared = {function.name for function in kvq_header.functions(pathlib.Path(header).read_text())}
    for name in sorted(exported ^ declared):
        print(f"{name}: " + ("exported, not in kvq.h" if name in exported else "in kvq.h, not exported"))
    if exported != declared:
        sys.exit(f"{len(exported)} symbols are exported, {len(declared)} functions are declared")


{"generate": generate, "golden": golden, "symbols": symbols}[sys.argv[1]](*sys.argv[2:])
