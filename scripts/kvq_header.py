"""What kvq.h declares, read from its text: constants, structs and functions.

The header is plain enough for regular expressions, and the tests of the ABI would notice if that changed: they compile what
this module says and compare it with a golden table.  Used by tests/abi and by the generator of bindings/python.
"""

import re
from typing import NamedTuple


class Field(NamedTuple):
    type: str  # as in C, without the name: "uint32_t", "const float *", "char[32]", "void (*)(void *user)"
    name: str


class Struct(NamedTuple):
    name: str
    fields: list


class Function(NamedTuple):
    returns: str
    name: str
    parameters: list


def _plain(text):
    """Without comments, preprocessor lines and needless white space."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    return re.sub(r"\s+", " ", text)


def _field(text):
    """One declaration, "const float *const *hidden" or "char name[32]", as a Field."""
    text = text.strip()
    if match := re.fullmatch(r"(.*\(\*)(\w+)(\).*)", text):  # pointer to function
        return Field(match[1] + match[3], match[2])
    base, name, array = re.fullmatch(r"(.*?)(\w+)((?:\[\w+\])*)", text).groups()
    return Field(base.strip() + array, name)


def _fields(body):
    """Fields of a struct body; "uint64_t a, b[2];" are two."""
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        if "(" in declaration:
            fields.append(_field(declaration))
            continue
        first, *others = declaration.split(",")
        fields.append(_field(first))
        base = re.match(r"(?:const )?\w+", first)[0]
        fields += [_field(f"{base} {other.strip()}") for other in others]
    return fields


def constants(text):
    """Names of all constants, in order, without those of the version, which are meant to change."""
    names = re.findall(r"^#define (KVQ_[A-Z0-9_]+) +[(\dU]", text, flags=re.M)
    return [name for name in names if not name.startswith("KVQ_VERSION_")]


def structs(text):
    found = re.findall(r"typedef struct (\w+) \{(.*?)\} \w+ ?;", _plain(text))
    return [Struct(name, _fields(body)) for name, body in found]


def functions(text):
    found = re.findall(r"KVQ_API ([^(;]*?)(kvq_\w+)\(([^)]*)\);", _plain(text))
    return [
        Function(returns.strip(), name, [] if parameters == "void" else [_field(p) for p in parameters.split(",")])
        for returns, name, parameters in found
    ]
