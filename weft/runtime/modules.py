"""Generated Python source to a module, through the private cache, so that it can be read and stepped through."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

from weft.core import cache
from weft.core.errors import KernelError


@functools.cache
def load(source: str) -> ModuleType:
    """The module whose text is `source`; equal text gives the same module."""
    name = f"weft_generated_{cache.digest(source)}"
    return cache.entry(f"{name}.py", lambda out: _write(out, source), lambda path: _import(path, name, source))


def _import(path: Path, name: str, source: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or path.read_text() != source:
        raise KernelError("generated code was changed in the cache", needed="the text that was written",
                          found=f"another text in {path}", try_=f"rm {path}")  # fmt: skip
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write(out: Path, source: str) -> None:
    out.write_text(source)
