"""Whether a backend's operators are right: the operator contract as something to run.

``vllm-fl conformance --backend NAME`` and ``pytest --pyargs vllm_fl.conformance
--vllm-fl-backend NAME`` run it. It needs torch, which no wheel of vllm-fl brings:
the torch is the user's. What is judged, and why so, is in ``docs/conformance.md``.
"""

from __future__ import annotations
