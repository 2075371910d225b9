"""``python -m benchmarks``: every benchmark of this package in one table."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback

import benchmarks
from benchmarks.harness import Row, arguments, as_json, scales, show


def main() -> int:
    """Run the benchmarks; 1 if one of them broke, whatever goals were reached."""
    parser = arguments("Measure opdtool beside the plain way of doing the same.")
    parser.add_argument("names", nargs="*", help="benchmarks to run; all without a name")
    options = parser.parse_args()
    found = [m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name != "__main__"]
    unknown = sorted(set(options.names) - set(found))
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(found)}")
    measured: list[Row] = []
    broken = []
    for name in options.names or found:
        try:
            rows = getattr(importlib.import_module(f"benchmarks.{name}"), "rows", None)
            if rows is None:
                continue
            for scale in scales(options.scale):
                print(f"{name}, {scale} ...", file=sys.stderr, flush=True)
                measured += rows(scale)
        except Exception:
            # The others are still worth their time.
            traceback.print_exc()
            broken.append(name)
    if options.json:
        print(as_json(measured), end="")
    else:
        show(measured)
    if broken:
        print(f"did not run to the end: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
