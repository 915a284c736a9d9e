"""Environments of peers: packages in a separate environment, and wheels unpacked without their dependencies.

The environment sees the packages of the one that runs this (torch, triton), so they are not downloaded again.
Leaves out: running anything.
"""

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
ROOTS = [str(TOP / root) for root in ("reference", "optimized", "harness", "tests")]


def python_of(folder: Path) -> Path:
    """The Python of the environment in `folder`, which is made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                              capture_output=True, text=True).stdout.strip()  # fmt: skip
        (Path(site) / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def install(python: Path, needs: Iterable[str]) -> str | None:
    """Install them; what went wrong, in a line. A package that is there is kept."""
    if not (wanted := sorted(set(needs))):
        return None
    return _pip(python, "install", "--quiet", *wanted)


def unpack(python: Path, folder: Path, wheel: str) -> str | None:
    """Unpack the wheel of `wheel` ("name==version") into a separate folder in `folder`. Returns an error, in a line."""
    place = folder / wheel.replace("==", "-")
    if place.is_dir():
        return None
    if said := _pip(python, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), wheel):
        return said
    name, _, version = wheel.partition("==")
    files = [path for path in folder.glob("*.whl") if path.name.replace("_", "-").startswith(f"{name}-{version}-")]
    if not files:
        return f"no wheel of {wheel} came"
    half = place.with_name(f"{place.name}.part")  # a broken run leaves no folder that looks whole
    with zipfile.ZipFile(max(files)) as archive:
        archive.extractall(half)
    half.rename(place)
    for file in files:
        file.unlink()
    return None


def environment(unpacked: Iterable[Path]) -> dict[str, str]:
    """The variables of a peer's process: our packages and the unpacked wheels are importable, one thread."""
    return {"PYTHONPATH": os.pathsep.join([*ROOTS, *map(str, unpacked)]), "OMP_NUM_THREADS": "1"}


def _pip(python: Path, *words: str) -> str | None:
    command = [str(python), "-m", "pip", *words, "--disable-pip-version-check"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"{python}: {error.strerror}"
    return (ran.stderr.strip().splitlines() or [f"pip ended with {ran.returncode}"])[-1] if ran.returncode else None
