"""Run one request file through vLLM's LLM class: a script of its own, since vLLM spawns.

Usage: ``python _engine_child.py REQUEST.json RESULT.json``; see :mod:`engine`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from types import ModuleType


def load_setup(path: str) -> ModuleType:
    # A module with a file: Dynamo and vLLM's compile cache read the source of what they trace.
    spec = importlib.util.spec_from_file_location("e2e_setup", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["e2e_setup"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    setup = load_setup(request["setup"])

    from evidence import wait_for_records
    from vllm import LLM
    from vllm import SamplingParams

    llm = LLM(**request["engine_args"])
    sampling = SamplingParams(
        temperature=0, max_tokens=request["max_tokens"], detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    report = getattr(setup, "report", None)
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "report": report(llm) if report else None,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))
    if "VLLM_FL_TRACE_DIR" in os.environ:
        # This process and its workers end without a word: let them write their records first.
        wait_for_records(Path(os.environ["VLLM_FL_TRACE_DIR"]))
    # Not Python's clean-up, which takes three seconds of a run's thirteen.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
