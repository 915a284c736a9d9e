"""Find the object at an address: `module:attribute`, or `path/to/file.py:attribute`.

The current directory is searched for modules, as pytest, gunicorn and uvicorn do, except under `python -P`. Leaves out:
names of op sets (`load`), and the words of an error.
"""

import os
import sys
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def split(address: str) -> tuple[str, str]:
    """The module or file, and the attribute; both are empty if this is no address."""
    module, _, attribute = address.rpartition(":")
    return (module, attribute) if module and attribute else ("", "")


def is_file(module: str) -> bool:
    """Whether an address names its module by a file."""
    return module.endswith(".py")


def module_at(module: str) -> ModuleType:
    """Import the module or the file. Raises what the import raises."""
    if is_file(module):
        return _from_file(Path(module))
    _search_current_directory(module.partition(".")[0])
    return import_module(module)


def attribute_at(address: str) -> object:
    """The object at an address. Raises what the import of its module raises."""
    module, attribute = split(address)
    return getattr(module_at(module), attribute)


def root_of(file: Path, module: str) -> Path | None:
    """The folder from which Python imports this file under the name of the module; None: it imports it from nowhere."""
    parts = module.split(".")
    inside = file.parent if file.name == "__init__.py" else file.with_suffix("")
    return inside.parents[len(parts) - 1] if list(inside.parts[-len(parts):]) == parts else None


def _search_current_directory(name: str) -> None:
    """Put the current directory first on the path if it has this module, and no import has found another one."""
    here = Path.cwd()
    if sys.flags.safe_path or name in sys.modules or str(here) in sys.path:
        return
    if (here / f"{name}.py").is_file() or (here / name).is_dir():
        sys.path.insert(0, str(here))


def _from_file(path: Path) -> ModuleType:
    """Import a file as its module, with its folder on the path; a file of a package as a module of the package."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there" if path.is_absolute() else f"{path} is not in {os.getcwd()}")
    path = path.resolve()
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    loaded = sys.modules.get(name)
    if loaded is None and root != path.parent:
        return import_module(name)
    if loaded is not None:
        if Path(str(getattr(loaded, "__file__", ""))).resolve() == path:
            return loaded
        name += "_" + sha256(str(path).encode()).hexdigest()[:8]  # another module has this name
        if name in sys.modules:
            return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
