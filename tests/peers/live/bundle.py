"""`python -m peers.live.bundle`: pack a released SGLang into a folder that a GPU machine without a network can run.

The folder has the engine without what a small hybrid model never calls, one kernel library, the packages that SGLang
needs and the machine lacks, and the trained model of `fixtures/tiny` as SGLang loads it. `peers.live.serve` runs it.
Leaves out: torch, triton, numpy and the other packages that the machine has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from instep.cli.fixtures import Engine, config_for

TOP = Path(__file__).resolve().parents[3]
MODEL = TOP / "fixtures" / "tiny"
LIMIT = 60 << 20  # bytes of a folder that is carried to the machine
PRESET = 3  # of xz
PYTHON = "3.12"  # of the machine
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux2014", "manylinux_2_17", "manylinux_2_12")


@dataclass(frozen=True)
class Release:
    """Needs of one release. kernel, transformers: versions that serve it; models: files of `srt/models` to pack."""

    kernel: str = "0.4.3"
    transformers: str = "5.12.1"
    models: tuple[str, ...] = (
        "__init__", "registry", "utils", "qwen2_moe", "qwen3_vl", "qwen3_5", "qwen3_5_mtp", "qwen3", "qwen2",
        "qwen3_moe", "llama", "transformers",
    )  # fmt: skip


RELEASES = {"0.5.12": Release(), "0.5.13": Release()}
SITE = (
    "pydantic", "pydantic_core", "typing-inspection", "annotated-types", "fastapi==0.115.12", "starlette==0.46.2",
    "uvicorn", "pyzmq", "msgspec", "orjson", "pybase64", "setproctitle", "python-multipart", "apache-tvm-ffi==0.1.9",
    "partial_json_parser", "compressed-tensors", "openai==2.6.1", "jiter", "distro", "sniffio", "interegular",
    "easydict", "gguf", "dill", "loguru",
)  # fmt: skip
UNUSED = (
    "sglang/multimodal_gen/", "sglang/benchmark/", "sglang/test/", "sglang/jit_kernel/tests/", "sglang/srt/grpc/_core",
)  # fmt: skip
STUBS = ("flashinfer", "IPython")

# Modules that SGLang imports at the top of its files and never calls here. transformers must not see them, as it asks
# for their versions, so they exist for callers in the engine alone. A class of a stub raises when it is made.
SITECUSTOMIZE = f'''"""Stand-ins for packages that the engine imports and this model never calls."""
import importlib.abc
import importlib.machinery
import sys
import types

NAMES = {STUBS!r}


class Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Kind(name, (Absent,), {{}})


class Absent(metaclass=Kind):
    def __init__(self, *given, **named):
        raise RuntimeError(f"{{type(self).__name__}} of a package that was not packed was called")


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = Kind(name, (Absent,), {{}})
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in NAMES:
            return None
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None or "/sglang/" not in frame.f_code.co_filename:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
'''


def download(folder: Path, *wheels: str) -> None:
    """Download wheels for the machine's Python; those that are there are kept."""
    platforms = [word for one in PLATFORMS for word in ("--platform", f"{one}_x86_64")]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                    "--disable-pip-version-check", "--python-version", PYTHON, *platforms, "--dest", str(folder),
                    *wheels], check=True)  # fmt: skip


def wheel_of(folder: Path, wanted: str) -> Path:
    """The newest wheel of "name" or "name==version" in a folder."""
    name, _, version = wanted.partition("==")
    begin = f"{name.replace('-', '_').lower()}-{version and version + '-'}"
    found = [one for one in folder.glob("*.whl") if one.name.lower().startswith(begin)]
    if not found:
        raise SystemExit(f"no wheel of {wanted} in {folder}")
    return max(found, key=lambda one: one.stat().st_mtime)


def unpack(wheel: Path, into: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
    with zipfile.ZipFile(wheel) as opened:
        for name in opened.namelist():
            if not name.endswith("/") and keep(name):
                opened.extract(name, into)


def of_engine(release: Release) -> Callable[[str], bool]:
    """The files of SGLang that are packed."""
    def keep(name: str) -> bool:
        parts = name.split("/")
        if name.startswith(UNUSED) or not name.endswith((".py", ".json", "METADATA", "entry_points.txt")):
            return name.endswith((".cuh", ".h", ".cu")) and name.startswith("sglang/jit_kernel/")
        of_a_model = parts[:3] == ["sglang", "srt", "models"]
        return not of_a_model or (len(parts) == 4 and parts[3].removesuffix(".py") in release.models)

    return keep


def of_kernels(name: str) -> bool:
    """The Python of sgl_kernel, and its library for one architecture."""
    python = name.startswith("sgl_kernel/") and name.endswith(".py")
    return python or name == "sgl_kernel/sm90/common_ops.abi3.so" or name.endswith("METADATA")


def of_transformers(name: str) -> bool:
    return name.endswith((".py", "METADATA"))


def widen(folder: Path) -> None:
    """Let transformers take the tokenizers of the machine, which are newer by a patch."""
    table = folder / "transformers" / "dependency_versions_table.py"
    text = table.read_text()
    lines = [line for line in text.splitlines() if '"tokenizers"' in line]
    if len(lines) != 1:
        raise SystemExit(f"{table} has {len(lines)} lines on tokenizers; one is expected")
    table.write_text(text.replace(lines[0], '    "tokenizers": "tokenizers>=0.22.0",'))


def library(name: str, folder: Path) -> None:
    """Copy a shared library of this machine, which the other one lacks."""
    found = [one for root in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/lib/x86_64-linux-gnu")
             for one in Path(root).glob(name)]  # fmt: skip
    if not found:
        raise SystemExit(f"{name} is not on this machine: apt-get install libnuma1")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(found[0].resolve(), folder / name)


def pack(release: str, out: Path, wheels: Path) -> Path:
    """Pack one release -> the folder `out`, with archives of less than LIMIT bytes together."""
    chosen = RELEASES[release]
    engine, kernel, models = (f"{name}=={version}" for name, version in (
        ("sglang", release), ("sglang-kernel", chosen.kernel), ("transformers", chosen.transformers)))  # fmt: skip
    download(wheels, engine, kernel, models, *SITE)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        unpack(wheel_of(wheels, engine), root / "engine", of_engine(chosen))
        unpack(wheel_of(wheels, kernel), root / "kernels", of_kernels)
        unpack(wheel_of(wheels, models), root / "site", of_transformers)
        widen(root / "site")
        for name in SITE:
            unpack(wheel_of(wheels, name), root / "site")
        (root / "stubs").mkdir()
        (root / "stubs" / "sitecustomize.py").write_text(SITECUSTOMIZE)
        library("libnuma.so.1", root / "lib")
        (root / "model").mkdir()
        shutil.copyfile(MODEL / "model.safetensors", root / "model" / "model.safetensors")
        config = config_for(Engine.SGLANG, json.loads((MODEL / "config.json").read_text()))
        (root / "model" / "config.json").write_bytes(config)
        (root / "release").write_text(release)
        with tarfile.open(out / "bundle.tar.xz", "w:xz", preset=PRESET) as archive:
            archive.add(root, ".")
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 2**20:.1f} MiB")
    if size > LIMIT:
        raise SystemExit(f"{size} bytes; at most {LIMIT} can be carried")
    return out


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.bundle", description="Pack a released SGLang for a GPU machine.")
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument("--release", choices=RELEASES, default="0.5.12")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels; what is missing is downloaded there, and kept")
    options = parser.parse_args(given)
    if options.wheels is not None:
        options.wheels.mkdir(parents=True, exist_ok=True)
        pack(options.release, options.out, options.wheels)
        return 0
    with tempfile.TemporaryDirectory() as wheels:
        pack(options.release, options.out, Path(wheels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
