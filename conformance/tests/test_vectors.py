"""The committed vectors are what the tool writes; the reference passes all of them; the set keeps its promises."""

import hashlib
import json
import subprocess

import pytest
from conformance_paths import CONFORMANCE
from kvqvectors import writer
from kvqvectors.__main__ import all_suites
from kvqvectors.writer import built, differences

VECTORS = CONFORMANCE / "vectors" / "v1"
MANIFEST = json.loads((VECTORS / "manifest.json").read_text())


def test_the_committed_vectors_are_what_the_tool_writes():
    assert differences(built(all_suites())) == []


def test_the_manifest_names_every_file_with_its_checksum():
    assert {f["name"] for f in MANIFEST["files"]} == {p.name for p in VECTORS.glob("*.json")} - {"manifest.json"}
    for entry in MANIFEST["files"]:
        data = (VECTORS / entry["name"]).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (entry["sha256"], entry["bytes"])


def test_a_published_set_is_never_written_again(monkeypatch):
    monkeypatch.setattr(writer, "is_published", lambda: True)
    with pytest.raises(SystemExit, match="never changes"):
        writer.write({})
    assert VECTORS.joinpath("manifest.json").exists()


def test_the_set_is_large_enough_and_small_enough():
    assert MANIFEST["tests"] >= 1500 and MANIFEST["bytes"] <= 12_000_000


@pytest.mark.parametrize("level,passed", [("L1", True), ("L9", False)])
def test_levels(conform, level, passed):
    done = conform("kvqref.exec", "--vectors", str(VECTORS / "statistics.json"), "--level", level)
    assert (done.returncode == 0) == passed


def test_no_test_is_a_failure(conform):
    done = conform("kvqref.exec", "--vectors", str(VECTORS), "--filter", "no such test")
    assert done.returncode == 1 and "no test ran" in done.stdout


def test_a_command_that_dies_or_hangs_is_a_failed_test_and_not_the_end(runner):
    file = str(VECTORS / "statistics.json")
    for command, why in (("exit 3", "ended or closed"), ("cat >/dev/null; sleep 60", "time limit")):
        done = subprocess.run(
            [str(runner), "--exec", command, "--vectors", file, "--time-limit", "2"], capture_output=True, text=True
        )
        assert done.returncode == 1 and why in done.stdout, done.stdout
