"""Write every generated place of the documentation anew."""

from __future__ import annotations

import sys

from tools.docs.pages import outdated
from tools.docs.pages import write

if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        for path in outdated():
            print(f"{path} is not what the code says; run: python -m tools.docs")
        sys.exit(1 if outdated() else 0)
    for path in write():
        print(f"wrote {path}")
