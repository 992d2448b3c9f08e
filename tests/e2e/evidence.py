"""What a run of vLLM left of the dispatch: the record of VLLM_FL_TRACE_DIR."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any
from typing import Final

from vllm_fl.dispatch import trace

if TYPE_CHECKING:
    from collections.abc import Mapping

PLUGINS: Final = Path(__file__).with_name("plugins")


#: Seconds in which no process has written its record, so that none has more to write.
_QUIET: Final = 10 * trace.WRITE_EVERY_SECONDS


def wait_for_records(folder: Path) -> None:
    """Wait until every process has written its record; those that are killed write none at the end."""
    seen: list[tuple[str, int]] | None = None
    begin = changed = time.monotonic()
    while time.monotonic() - changed < _QUIET and time.monotonic() - begin < 300:
        # One may be replaced meanwhile.
        with suppress(FileNotFoundError):
            found = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
            if found != seen:
                seen, changed = found, time.monotonic()
        time.sleep(trace.WRITE_EVERY_SECONDS)


class Evidence:
    """A folder for records, and what they say once a run has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def env(self, *plugins: str, **more: str) -> Mapping[str, str]:
        """Return the variables of a run that is recorded, with modules of ``plugins/`` as plug-ins."""
        variables = {trace.TRACE_DIR_ENV: str(self.folder), **more}
        if plugins:
            paths = [str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]
            variables["PYTHONPATH"] = os.pathsep.join(paths)
            variables["VLLM_FL_PLUGIN_MODULES"] = ",".join(plugins)
        return variables

    @property
    def processes(self) -> list[dict[str, Any]]:
        """Facts about every process that left a record."""
        found: list[dict[str, Any]] = trace.merge(self.folder)["processes"]
        return found

    def calls(self) -> dict[tuple[str, str], int]:
        """Return how often each (operator, implementation) was called from Python."""
        return {(e["op"], e["impl_id"]): e["calls"] for e in trace.merge(self.folder)["operators"]}

    def graphs(self) -> dict[tuple[str, str], int]:
        """Return into how many graphs each (operator, implementation) was traced."""
        return {(e["op"], e["impl_id"]): e["graphs"] for e in trace.merge(self.folder)["operators"]}

    def layers(self) -> dict[tuple[str, str, str], int]:
        """Return how many layers were built of each (class, implementation, form)."""
        return {
            (e["layer"], e["impl_id"], e["form"]): e["instances"] for e in trace.merge(self.folder)["layers"]
        }


def is_served(layer: Any) -> bool:
    """Whether one of vLLM's layers calls an operator."""
    from vllm_fl.integration.layer import serving

    return serving(layer) is not None
