"""What people do with models, by kinds. Each use is a row of the table in docs/conversion.md, in this order."""

import importlib

for _kind in ("quantisation", "functions", "steps", "several", "hung", "processes"):
    importlib.import_module(f"uses.{_kind}")
