"""Whether a backend's operators are right: the operator contract as something to run.

``vllm-fl conformance --backend NAME`` runs it, and so does pytest with the plug-in
``vllm_fl.conformance.pytest_options``. It needs torch, which no wheel of vllm-fl brings:
the torch is the user's. What is judged, and why so, is in ``docs/conformance.md``.
"""

from __future__ import annotations
