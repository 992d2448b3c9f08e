"""The process in which ``vllm-fl demo`` runs vLLM."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm_fl.child_processes import end_with_parent
from vllm_fl.dispatch.trace import WRITE_EVERY_SECONDS


def main() -> None:
    """Answer ``request.json`` of the folder in ``argv[1]`` with ``answer.json``."""
    work = Path(sys.argv[1])
    request: dict[str, Any] = json.loads((work / "request.json").read_text())

    import vllm

    llm = vllm.LLM(
        model=request["model"],
        dtype=request["dtype"],
        enforce_eager=request["eager"],
        max_model_len=1024,
        max_num_seqs=8,
        seed=0,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"])
    conversations: Any = [[{"role": "user", "content": prompt}] for prompt in request["prompts"]]
    # The first answer pays for what is compiled and allocated on first use.
    llm.chat(conversations, vllm.SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    started = time.perf_counter()
    answers = llm.chat(conversations, sampling, use_tqdm=False)
    answer = {
        "vllm": str(vllm.__version__),
        "seconds": time.perf_counter() - started,
        "texts": [a.outputs[0].text.strip() for a in answers],
        "tokens": [list(a.outputs[0].token_ids) for a in answers],
    }
    (work / "answer.json").write_text(json.dumps(answer))
    # vLLM kills its worker when this process ends: let it write its record first.
    time.sleep(3 * WRITE_EVERY_SECONDS)


if __name__ == "__main__":
    # vLLM starts its processes by spawning: they import this module again.
    end_with_parent()
    main()
