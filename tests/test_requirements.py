"""The lock is whole: every file by its hash, every dependency, and no licence that has not been
looked at.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = (
    "requirements.lock",
    "requirements-torch.lock",
    "requirements-triton.lock",
    "requirements-tensorrt.lock",
    "requirements-smollm2.lock",
)
# SPDX identifiers that may stand behind an Apache-2.0 program that is installed from their own
# packages.
ALLOWED = frozenset(
    {
        *(
            "0BSD",
            "Apache-2.0",
            "BSD-2-Clause",
            "BSD-3-Clause",
            "BSL-1.0",
            "CC0-1.0",
            "CNRI-Python",
            "ISC",
        ),
        *("LLVM-exception", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
    }
)
# How packages without an SPDX expression say the same, in a classifier or in words.
WORDS = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MPL-2.0 AND MIT": "MPL-2.0 AND MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}


def _locked(file: str) -> dict[str, list[str]]:
    """Canonical name -> hashes."""
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / file).read_text().partition("\n")[2])
    pins = [entry for entry in entries if not entry.startswith("#")]
    names = [re.match(r"([A-Za-z0-9._-]+)==[^\s;]+", pin) for pin in pins]
    assert all(names), pins
    return {
        canonicalize_name(n[1]): re.findall(r"--hash=sha256:[0-9a-f]{64}\b", pin)
        for n, pin in zip(names, pins, strict=True)
        if n
    }


def _expression(name: str) -> str:
    metadata = distribution(name).metadata
    if metadata["License-Expression"]:
        return str(metadata["License-Expression"])
    classifiers = [
        c.rpartition(" :: ")[2]
        for c in metadata.get_all("Classifier") or []
        if c.startswith("License ::")
    ]
    words = classifiers or [str(metadata["License"] or "")]
    return " AND ".join(WORDS.get(word, word) for word in words)


def _not_allowed(expression: str) -> list[str]:
    """Licences of an SPDX expression that are not allowed; of alternatives, one that is allowed
    is enough.
    """
    bad = []
    for term in re.split(r" AND ", expression.replace("(", "").replace(")", "")):
        options = [re.split(r" WITH ", option) for option in re.split(r" OR ", term)]
        if not any(set(parts) <= ALLOWED for parts in options):
            bad.append(term or "no licence named")
    return bad


@pytest.mark.parametrize("file", LOCKS)
def test_every_locked_package_has_hashes(file: str) -> None:
    locked = _locked(file)
    assert locked
    assert not [name for name, hashes in locked.items() if not hashes]


def test_every_dependency_is_locked() -> None:
    locked = _locked(LOCKS[0]) | _locked(LOCKS[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
    ]
    queue, seen = (
        [Requirement(line) for line in (*wanted, *project["build-system"]["requires"])],
        set(),
    )
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen or (
            name == "torch" and "torch" in {n for n, *_ in seen}
        ):
            continue
        seen.add((name, *requirement.extras))
        assert name in locked, f"{requirement} is in no lock: run tools/lock.sh"
        for line in distribution(name).requires or ():
            needed = Requirement(line)
            extras = requirement.extras or {""}
            cuda = name == "torch" and "nvidia" in line
            if not cuda and (
                not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras)
            ):
                queue.append(needed)


def test_every_licence_has_been_looked_at() -> None:
    found = {
        name: _not_allowed(_expression(name)) for name in _locked(LOCKS[0]) | _locked(LOCKS[1])
    }
    assert not {name: bad for name, bad in found.items() if bad}


@pytest.mark.parametrize(
    ("expression", "bad"),
    [
        ("MIT", []),
        ("Apache-2.0 OR GPL-3.0-only", []),
        ("MIT AND GPL-3.0-only", ["GPL-3.0-only"]),
        ("Apache-2.0 WITH LLVM-exception", []),
        ("", ["no licence named"]),
        ("Proprietary", ["Proprietary"]),
    ],
)
def test_licence_that_is_not_allowed_is_named(expression: str, bad: list[str]) -> None:
    assert _not_allowed(expression) == bad
