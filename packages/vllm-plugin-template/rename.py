"""Make a vendor's package of a copy of this folder: ``python rename.py acme``.

Needs ``pip install vllm-fl-core``, whose ``vllm-fl new-vendor`` does the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_fl.cli.new_vendor import rename
from vllm_fl.cli.output import Problem

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        rename(Path(__file__).resolve().parent, sys.argv[1])
    except Problem as problem:
        sys.exit(f"rename.py: {problem}")
