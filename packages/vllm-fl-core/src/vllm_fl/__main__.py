"""``python -m vllm_fl`` is ``vllm-fl``."""

from __future__ import annotations

from vllm_fl.cli import run_and_leave

if __name__ == "__main__":
    run_and_leave()
