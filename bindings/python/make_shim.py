"""make_shim.py HEADER OUT.c: write the functions of kvq.h as calls through pointers that dlopen fills.

The SWIG wrapper links with these instead of with libkvq, so that one wheel works with any build of the library.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import kvq_header  # noqa: E402

TEMPLATE = """/* Written by make_shim.py from kvq.h. */
#include "shim.h"

#include <dlfcn.h>
#include <stdio.h>

#include "kvq/kvq.h"

static const char *const names[] = {{
{names}
}};
enum {{ COUNT = sizeof names / sizeof names[0] }};
static void (*functions[COUNT])(void);

int shim_load(const char *file, char *message, size_t cap) {{
  void (*found[COUNT])(void);
  void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library) {{
    snprintf(message, cap, "%s", dlerror());
    return -1;
  }}
  for (int i = 0; i < COUNT; ++i) {{
    *(void **)&found[i] = dlsym(library, names[i]);
    if (!found[i]) {{
      snprintf(message, cap, "%s has no %s: it is another version of libkvq", file, names[i]);
      dlclose(library);
      return -1;
    }}
  }}
  for (int i = 0; i < COUNT; ++i) functions[i] = found[i];
  return 0;
}}

{trampolines}
"""


def trampoline(index, function):
    types = ", ".join(p.type for p in function.parameters) or "void"
    declared = ", ".join(declare(p) for p in function.parameters) or "void"
    arguments = ", ".join(p.name for p in function.parameters)
    call = f"(({function.returns} (*)({types}))functions[{index}])({arguments})"
    return f"{function.returns} {function.name}({declared}) {{ {'' if function.returns == 'void' else 'return '}{call}; }}"


def declare(parameter):
    base, bracket, array = parameter.type.partition("[")
    return f"{base} {parameter.name}{bracket}{array}"


header, out = map(pathlib.Path, sys.argv[1:])
functions = kvq_header.functions(header.read_text())
out.write_text(
    TEMPLATE.format(
        names="\n".join(f'  "{f.name}",' for f in functions),
        trampolines="\n".join(trampoline(i, f) for i, f in enumerate(functions)),
    )
)
