"""A pytest plugin: `kvstrata._native` comes from the folder KVSTRATA_NATIVE, where `make sanitize` built it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import kvstrata

(path,) = Path(os.environ["KVSTRATA_NATIVE"]).glob("_native*.so")
spec = importlib.util.spec_from_file_location("kvstrata._native", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules["kvstrata._native"] = kvstrata._native = module
