"""Compare vLLM under vllm-fl with golden tokens, in each of the ways in which it runs.

``python cells.py RESULTS.json FOLDER [PART ...]`` runs in an environment that has a vLLM and the
wheels; ``run.py`` makes one for each version. The checkpoints are made there, under FOLDER,
because their format belongs to the transformers that each vLLM brings: the golden tokens are
that transformers', in float32, and vLLM without plug-ins is held to them, too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import Final
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from checkpoints import NEW_TOKENS
from checkpoints import build
from engine import more_engines
from engine import run_vllm
from evidence import Evidence

if TYPE_CHECKING:
    from checkpoints import Checkpoint
    from engine import Mode
    from engine import Result

    Status = Literal["golden", "differs", "failed"]

REFERENCE: Final = "reference.torch"
#: The operators of both models, by what calls them.
EVERYWHERE: Final = {"silu_and_mul", "rms_norm", "rotary_embedding"}
EXPERTS: Final = {"fused_experts", "topk_softmax"}

#: The second model's engine, in the process of the first one's. The experts' is the first: vLLM makes the
#: groups of ranks once for a process, and those that experts need for such a model only.
_SECOND = """
def report(llm):
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = LLM(**ENGINE_ARGS).generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to run vLLM, for a dense model and one with experts."""

    name: str
    mode: Mode
    #: Whether each engine has a process of its own, as vLLM has it unless told otherwise.
    apart: bool
    #: What the policy asks for; None is vLLM without plug-ins.
    variables: dict[str, str] | None
    #: Which implementation serves the layers then.
    serves: str


_ASKED: Final = {"VLLM_FL_PREFER": "reference"}
CELLS: Final = (
    Cell("native", "eager", apart=True, variables=None, serves="native"),
    Cell("eager, reference asked for", "eager", apart=False, variables=_ASKED, serves=REFERENCE),
    Cell("eager, default policy", "eager", apart=True, variables={}, serves=REFERENCE),
    Cell("compiled, reference asked for", "compile", apart=True, variables=_ASKED, serves=REFERENCE),
    # Layers stay native in compiled mode, unless another implementation is asked for.
    Cell("compiled, default policy", "compile", apart=False, variables={}, serves="native"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one cell came to."""

    cell: str
    status: Status
    #: What was wrong, or why it failed.
    detail: str
    seconds: int


def run(cell: Cell, dense: Checkpoint, experts: Checkpoint, evidence: Evidence) -> tuple[Outcome, str]:
    """Run one cell and return its outcome and log; never raises for what happens in vLLM."""
    given = more_engines(dense.path, dense.prompts)
    eager = f"ENGINE_ARGS['enforce_eager'] = {cell.mode == 'eager'}\nNEW_TOKENS = {NEW_TOKENS}\n"
    result = run_vllm(
        experts,
        mode=cell.mode,
        native=cell.variables is None,
        in_process=not cell.apart,
        env=None if cell.variables is None else evidence.env(**cell.variables),
        setup=given + eager + _SECOND,
        timeout=1800,
    )
    status, found = _judge(cell, result, dense, experts, evidence)
    return Outcome(cell.name, status, "; ".join(found), round(result.seconds)), result.log


def _judge(
    cell: Cell, result: Result, dense: Checkpoint, experts: Checkpoint, evidence: Evidence
) -> tuple[Status, list[str]]:
    if result.returncode or not result.tokens:
        errors = [line.strip() for line in result.log.splitlines() if "Error" in line]
        end = "ran past its time" if result.timed_out else f"ended with {result.returncode}"
        return "failed", [f"{end}: {errors[-1][-300:] if errors else 'no error in its log'}"]
    found = []
    for model, golden, got in (("experts", experts, result.tokens), ("dense", dense, result.report)):
        pairs = zip(map(tuple, got), golden.golden, strict=True)
        wrong = sum(tokens != right for tokens, right in pairs)
        if wrong:
            found.append(f"{model}: {wrong} of {len(golden.golden)} prompts have other tokens")
    found += _not_in_trace(cell, evidence)
    return ("differs" if found else "golden"), found


def _not_in_trace(cell: Cell, evidence: Evidence) -> list[str]:
    """Say what the record does not show of who computed each operator and serves each layer."""
    if cell.variables is None:
        return []
    ran = {key for counts in (evidence.calls(), evidence.graphs()) for key, count in counts.items() if count}
    # Where the experts and their router stay vLLM's own, vLLM calls them without a layer of ours.
    wanted = EVERYWHERE if cell.serves == "native" else EVERYWHERE | EXPERTS
    found = [f"{cell.serves} of {op} did not run" for op in sorted(wanted) if (op, cell.serves) not in ran]
    found += [f"{impl_id} of {op} ran" for op, impl_id in sorted(ran) if impl_id != cell.serves]
    layers: Any = evidence.layers()
    return found + [f"{impl_id} serves {name}" for name, impl_id, _ in layers if impl_id != cell.serves]


def main(results: Path, folder: Path, parts: list[str]) -> None:
    """Run the cells whose name has one of the parts; after each write the outcomes so far."""
    dense, experts = (build(name, folder) for name in ("qwen3", "qwen3_moe"))
    outcomes: list[Outcome] = []
    for cell in CELLS:
        if parts and not any(part in cell.name for part in parts):
            continue
        with tempfile.TemporaryDirectory(prefix="vllm-fl-versions-") as work:
            outcome, log = run(cell, dense, experts, Evidence(Path(work)))
        outcomes.append(outcome)
        if outcome.status != "golden":
            (folder / f"{cell.name}.log").write_text(log)
        print(f"  {cell.name}: {outcome.status} ({outcome.seconds} s) {outcome.detail}", flush=True)
        results.write_text(json.dumps([asdict(one) for one in outcomes]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
