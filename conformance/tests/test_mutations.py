"""Every mutation of the reference is caught by the test that it names (and the reference passes all: ctest conform_reference)."""

import json
from functools import lru_cache

import pytest
from conformance_paths import CONFORMANCE
from kvqmutants import __main__ as mutants
from kvqmutants.patch import TABLE

VECTORS = CONFORMANCE / "vectors" / "v1"


@lru_cache
def ids(suite: str) -> dict[str, str]:
    """group/slug -> the full name of a test."""
    vectors = json.loads((VECTORS / f"{suite}.json").read_text())
    return {
        f"{group['id']}/{test['id'].split('-', 1)[1]}": f"{suite}/{group['id']}/{test['id']}"
        for group in vectors["groups"]
        for test in group["tests"]
    }


def full_name(test: str) -> tuple[str, str]:
    """File and full name of suite/group/slug."""
    suite, rest = test.split("/", 1)
    return str(VECTORS / f"{suite}.json"), ids(suite)[rest]


def test_there_are_enough_mutations():
    assert len(TABLE) >= 25 and mutants.main([]) == 0


@pytest.mark.parametrize("name", TABLE)
def test_the_mutation_is_caught(conform, name):
    file, test = full_name(TABLE[name].test)
    done = conform(f"kvqmutants {name}", "--vectors", file, "--filter", test)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[0] == f"FAILED  {test}", f"{TABLE[name].wrong}: not noticed\n{done.stdout}{done.stderr}"
    broken = any(word in lines[1] for word in ("Error:", "ended or closed", "no JSON"))
    assert not broken, f"the mutant does not work: {lines[1]}"
