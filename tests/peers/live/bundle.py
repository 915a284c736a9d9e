"""`python -m peers.live.bundle`: pack released SGLang engines into a folder for a GPU machine without a network.

The folder has each engine without what a small hybrid model never calls, its kernel library for one architecture, the
packages that SGLang needs and the machine lacks, and the trained model of `fixtures/tiny` as SGLang loads it. Files
that releases share are in the archive once. `peers.live.run` runs it.
Leaves out: torch, triton, numpy and the other packages that the machine has.
"""

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import ARCHIVE, TOP

MODEL = TOP / "fixtures" / "tiny"
LIMIT = 60 << 20  # bytes of a folder that is carried to the machine
# xz finds equal parts of releases, and of kernel libraries, only within its dictionary.
PACKED = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 256 << 20}]
PYTHON = "3.12"  # of the machine
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux2014", "manylinux_2_17", "manylinux_2_12")
TRANSFORMERS = "5.12.1"  # serves all releases; 0.5.15 and later pin it


@dataclass(frozen=True)
class Release:
    """Needs of one release. kernel: the version of sglang-kernel; models: files and folders of `srt/models`.

    site: packages of this release alone; stubs: packages that it imports and never calls
    """

    kernel: str
    models: tuple[str, ...]
    site: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ("flashinfer", "IPython")


_13 = Release("0.4.3", (
    "__init__", "registry", "utils", "qwen2_moe", "qwen3_vl", "qwen3_5", "qwen3_5_mtp", "qwen3", "qwen2", "qwen3_moe",
    "llama", "transformers",
))  # fmt: skip
_16 = Release("0.4.5", (*_13.models, "deepseek_v2", "deepseek_common"), ("apache-tvm-ffi==0.1.11",),
              (*_13.stubs, "xgrammar", "deep_gemm"))  # fmt: skip
# 0.5.12 pins kernel 0.4.2.post2; 0.4.3 serves it, too. Releases to 0.5.17 get the one that they pin. Later ones pin a
# newer torch (2.13, 2.14), and their kernel libraries need symbols of it; with that of 0.5.17 they can be imported.
RELEASES = {
    "0.5.12": _13, "0.5.13": _13, "0.5.14": replace(_13, kernel="0.4.4"),
    **dict.fromkeys(("0.5.16", "0.5.17", "0.5.18", "0.5.20"), _16),
    "0.5.23": replace(_16, stubs=(*_16.stubs, "flash_mla")),
}  # fmt: skip
SITE = (
    "pydantic", "pydantic_core", "typing-inspection", "annotated-types", "fastapi==0.115.12", "starlette==0.46.2",
    "uvicorn", "pyzmq", "msgspec", "orjson", "pybase64", "setproctitle", "python-multipart", "apache-tvm-ffi==0.1.9",
    "partial_json_parser", "compressed-tensors", "openai==2.6.1", "jiter", "distro", "sniffio", "interegular",
    "easydict", "gguf", "dill", "loguru",
)  # fmt: skip
UNUSED = (
    "sglang/multimodal_gen/", "sglang/benchmark/", "sglang/test/", "sglang/jit_kernel/tests/", "sglang/srt/grpc/_core",
)  # fmt: skip
COMPILED = ("sglang/jit_kernel/", "sglang/kernels/")  # with sources that are compiled at run time

# Modules that SGLang imports at the top of its files and never calls here. transformers must not see them, as it asks
# for their versions, so they exist for callers in the engine alone. A class of a stub raises when it is made.
SITECUSTOMIZE = '''"""Stand-ins for packages that the engine imports and this model never calls."""
import importlib.abc
import importlib.machinery
import os
import sys
import types

NAMES = os.environ.get("PEERS_STUBS", "").split(",")


class Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Kind(name, (Absent,), {})


class Absent(metaclass=Kind):
    def __init__(self, *given, **named):
        raise RuntimeError(f"{type(self).__name__} of a package that was not packed was called")

    @classmethod
    def __get_pydantic_core_schema__(cls, *given):  # a field of a request whose type was not packed
        from pydantic_core import core_schema

        return core_schema.any_schema()


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = Kind(name, (Absent,), {})
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
            return name.endswith((".cuh", ".h", ".hpp", ".cu", ".cpp")) and name.startswith(COMPILED)
        return parts[:3] != ["sglang", "srt", "models"] or parts[3].removesuffix(".py") in release.models

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


def pack(releases: Sequence[str], out: Path, wheels: Path) -> Path:
    """Pack releases -> the folder `out`, with an archive of less than LIMIT bytes."""
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        fill(root, releases, wheels)
        with lzma.open(out / ARCHIVE, "w", format=lzma.FORMAT_XZ, filters=PACKED) as packed, \
                tarfile.open(fileobj=packed, mode="w") as archive:  # fmt: skip
            archive.add(root, ".")
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 2**20:.1f} MiB")
    if size > LIMIT:
        raise SystemExit(f"{size} bytes; at most {LIMIT} can be carried")
    return out


def fill(root: Path, releases: Sequence[str], wheels: Path) -> None:
    """Write the files of a bundle: engines and kernels in a folder of each version, then what they share."""
    from instep.cli.fixtures import Engine, config_for  # here, because a recorded engine's instep has no commands

    chosen = {name: RELEASES[name] for name in releases}
    kernels = {one.kernel for one in chosen.values()}
    download(wheels, f"transformers=={TRANSFORMERS}", *SITE)
    for name, release in chosen.items():  # pip takes one version of a package at a time
        download(wheels, f"sglang=={name}", f"sglang-kernel=={release.kernel}", *release.site)
        unpack(wheel_of(wheels, f"sglang=={name}"), root / "engine" / name, of_engine(release))
        for package in release.site:
            unpack(wheel_of(wheels, package), root / "engine" / name)
    for kernel in kernels:
        unpack(wheel_of(wheels, f"sglang-kernel=={kernel}"), root / "kernels" / kernel, of_kernels)
    unpack(wheel_of(wheels, f"transformers=={TRANSFORMERS}"), root / "site", of_transformers)
    widen(root / "site")
    for name in SITE:
        unpack(wheel_of(wheels, name), root / "site")
    (root / "stubs").mkdir()
    (root / "stubs" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    library("libnuma.so.1", root / "lib")
    (root / "model").mkdir()
    (root / "draft").mkdir()  # 0.5.12 edits the cached config of a draft model, so the draft has a path of its own
    shutil.copyfile(MODEL / "model.safetensors", root / "model" / "model.safetensors")
    config = config_for(Engine.SGLANG, json.loads((MODEL / "config.json").read_text()))
    (root / "model" / "config.json").write_bytes(config)
    for file in (root / "model").iterdir():
        os.link(file, root / "draft" / file.name)
    facts = {name: {"kernel": one.kernel, "stubs": one.stubs} for name, one in chosen.items()}
    (root / "releases.json").write_text(json.dumps(facts))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.bundle", description="Pack released SGLangs for a GPU machine.")
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument("--release", choices=RELEASES, action="append", help="repeatable; left out: all")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels; what is missing is downloaded there, and kept")
    options = parser.parse_args(given)
    releases = options.release or list(RELEASES)
    if options.wheels is not None:
        options.wheels.mkdir(parents=True, exist_ok=True)
        pack(releases, options.out, options.wheels)
        return 0
    with tempfile.TemporaryDirectory() as wheels:
        pack(releases, options.out, Path(wheels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
