"""Numbers, validates and writes a vector set; compares a written set with what would be written.

A set is a folder of vector files and a manifest with their SHA-256. Once the manifest says "published", the
files are never written again: what is wrong with them goes into ERRATA.md, what is new into the next set.
"""

import hashlib
import json
from pathlib import Path

import jsonschema

from .script import Suite

SCHEMA_NAME = "kvq-vectors/1"
CONFORMANCE = Path(__file__).resolve().parents[2]
SCHEMA = CONFORMANCE / "schema" / "kvq-vectors-1.json"
SET = CONFORMANCE / "vectors" / "v1"
MAX_BYTES = 12_000_000


def _numbered(suite: Suite) -> dict:
    """The file of a suite: tests are numbered within their group."""
    groups = []
    for group in suite.groups:
        tests = [
            {"id": f"{number:03d}-{test.slug}", "comment": test.comment, "flags": test.flags, "steps": test.steps}
            for number, test in enumerate(group.tests, 1)
        ]
        groups.append({"id": group.name, "note": group.note, "tests": tests})
    return {"schema": SCHEMA_NAME, "suite": suite.name, "groups": groups}


def _check(vectors: dict, validator) -> None:
    """The schema, and what a schema cannot say."""
    error = jsonschema.exceptions.best_match(validator.iter_errors(vectors))
    if error is not None:
        raise AssertionError(f"{vectors['suite']}: {error.json_path}: {error.message[:300]}")
    names = [group["id"] for group in vectors["groups"]]
    assert len(set(names)) == len(names), f"{vectors['suite']}: a group is there twice"
    for group in vectors["groups"]:
        slugs = [test["id"].split("-", 1)[1] for test in group["tests"]]
        twice = {slug for slug in slugs if slugs.count(slug) > 1}
        assert slugs and not twice, f"{vectors['suite']}/{group['id']}: no test, or the same slug twice: {twice}"


def _text(vectors: dict) -> str:
    """JSON with one test a line, so that differences can be read."""

    def compact(value) -> str:
        return json.dumps(value, separators=(",", ":"))

    lines = [f'{{"schema":{compact(vectors["schema"])},"suite":{compact(vectors["suite"])},"groups":[']
    for i, group in enumerate(vectors["groups"]):
        lines.append(f'{"," if i else ""}{{"id":{compact(group["id"])},"note":{compact(group["note"])},"tests":[')
        lines.append(",\n".join(compact(test) for test in group["tests"]))
        lines.append("]}")
    return "\n".join([*lines, "]}"]) + "\n"


def built(suites: list[Suite]) -> dict[str, str]:
    """File name -> text, the manifest included."""
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    files, listing = {}, []
    for suite in suites:
        vectors = _numbered(suite)
        _check(vectors, validator)
        name, text = f"{suite.name}.json", _text(vectors)
        assert name not in files, f"two suites are called {suite.name}"
        files[name] = text
        tests = sum(len(group["tests"]) for group in vectors["groups"])
        listing.append({"name": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "bytes": len(text), "tests": tests})
    listing.sort(key=lambda entry: entry["name"])
    total = {key: sum(entry[key] for entry in listing) for key in ("bytes", "tests")}
    assert total["bytes"] <= MAX_BYTES, f"{total['bytes']} bytes"
    manifest = {"schema": SCHEMA_NAME, "set": SET.name, "published": is_published(), **total, "files": listing}
    files["manifest.json"] = json.dumps(manifest, indent=1) + "\n"
    return files


def is_published() -> bool:
    manifest = SET / "manifest.json"
    return manifest.exists() and json.loads(manifest.read_text())["published"]


def differences(files: dict[str, str]) -> list[str]:
    """Names of files that are missing, too many, or other than what would be written."""
    there = {path.name for path in SET.glob("*.json")}
    wrong = [name for name, text in files.items() if name in there and (SET / name).read_text() != text]
    return sorted(wrong) + sorted(there ^ set(files))


def write(files: dict[str, str]) -> None:
    if is_published():
        raise SystemExit(f"{SET.name} is published and never changes: write ERRATA.md or the next set")
    SET.mkdir(parents=True, exist_ok=True)
    for path in SET.glob("*.json"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (SET / name).write_text(text)


def publish() -> None:
    """From now on the set never changes."""
    path = SET / "manifest.json"
    manifest = json.loads(path.read_text()) | {"published": True}
    path.write_text(json.dumps(manifest, indent=1) + "\n")
