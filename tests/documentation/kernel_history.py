"""The native kernels at a commit, and when their syntax trees changed last.

Leaves out: the digest itself (`instep/report/machine.py`).
"""

import io
import subprocess
import tarfile
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from instep.report.machine import KERNELS, LAUNCHES, PACKAGE, digest

TOP = Path(__file__).resolve().parents[2]
ROOT = f"optimized/{PACKAGE}"
PATHS = (f"{ROOT}/{KERNELS}", f"{ROOT}/{LAUNCHES}")


def has(commit: str) -> bool:
    """Whether this clone holds a commit: a shallow one may not."""
    return subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=TOP, check=False).returncode == 0


@cache
def digest_at(commit: str) -> str:
    """The digest of the kernels at a commit."""
    sources = {}
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit, "--", *PATHS))) as packed:
        for member in packed.getmembers():
            file = packed.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                sources[member.name.removeprefix(f"{ROOT}/")] = file.read().decode()
    return digest(sources)


def changed() -> datetime:
    """When the newest trees arrived. Commits that only changed comments do not count."""
    lines = _git("log", "--first-parent", "--format=%H %ct", "--", *PATHS).decode().splitlines()
    assert lines, "no history to tell the kernels' age by"
    now, arrived = digest_at("HEAD"), lines[0].split()[1]
    for line in lines:
        commit, seconds = line.split()
        if digest_at(commit) != now:
            break
        arrived = seconds
    return datetime.fromtimestamp(int(arrived), UTC)


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=TOP, capture_output=True, check=False)
    assert done.returncode == 0, f"git {words[0]}: {done.stderr.decode()}"
    return done.stdout
