"""``python -m vllm_fl`` is ``vllm-fl``."""

from __future__ import annotations

from vllm_fl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
