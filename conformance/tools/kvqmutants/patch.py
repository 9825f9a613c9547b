"""How a fault gets into the reference: functions and methods are replaced wherever they are bound."""

import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

import kvqref


@dataclass(frozen=True)
class Mutation:
    name: str
    wrong: str  # what it computes instead
    test: str  # suite/group/slug of a test that must fail
    apply: Callable[[], None]


TABLE: dict[str, Mutation] = {}


def mutation(name: str, wrong: str, test: str):
    """Decorator: enters the function that applies the fault into the table."""

    def enter(apply: Callable[[], None]) -> Callable[[], None]:
        assert name not in TABLE, f"two mutations are called {name}"
        TABLE[name] = Mutation(name, wrong, test, apply)
        return apply

    return enter


def load_all() -> None:
    """Every module of the reference, so that no later import binds an unpatched function."""
    for module in pkgutil.walk_packages(kvqref.__path__, "kvqref."):
        importlib.import_module(module.name)


def function(module: str, name: str, make: Callable) -> None:
    """Replace kvqref.MODULE.NAME by make(old) in every module that has imported it."""
    old = getattr(importlib.import_module(f"kvqref.{module}"), name)
    new = make(old)
    found = 0
    for loaded in [m for key, m in sys.modules.items() if key.split(".")[0] == "kvqref"]:
        for attribute, value in list(vars(loaded).items()):
            if value is old:
                setattr(loaded, attribute, new)
                found += 1
    assert found, f"{module}.{name} is bound nowhere"


def method(owner: type, name: str, make: Callable) -> None:
    """Replace a method of a class by make(old); class and static methods keep their kind."""
    old = owner.__dict__[name]
    kind = type(old) if isinstance(old, (classmethod, staticmethod, property)) else None
    inner = old.fget if kind is property else old.__func__ if kind else old
    setattr(owner, name, kind(make(inner)) if kind else make(inner))
