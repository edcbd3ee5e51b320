"""What a clone promises: pinned versions, no addresses, a configuration that can be read."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text()
PINNED = dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;]+)", LOCK, re.M))


def test_the_lock_has_versions_and_hashes_and_no_addresses() -> None:
    assert "://" not in LOCK
    assert len(PINNED) > 80
    for entry in re.split(r"^(?=[A-Za-z0-9])", LOCK, flags=re.M)[1:]:
        assert "--hash=sha256:" in entry, entry


@pytest.mark.parametrize("requirement", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
def test_the_lock_satisfies_every_dependency_and_so_does_this_environment(requirement: str) -> None:
    wanted = Requirement(requirement)
    assert PINNED[wanted.name] in wanted.specifier
    assert version(wanted.name) in wanted.specifier


def test_the_lock_of_uv_which_records_addresses_is_ignored() -> None:
    assert "uv.lock" in (ROOT / ".gitignore").read_text().splitlines()
