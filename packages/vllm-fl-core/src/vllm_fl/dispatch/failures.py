"""What a process has learned of its implementations: failures, first successes, trials.

Nothing here chooses. A decision takes what was set aside, a guard asks what is proven, and
both tell. Dicts are replaced and never edited, so that readers take no lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.dispatch.common.foreign import is_loggable
from vllm_fl.dispatch.common.fork import ForkSafeLock
from vllm_fl.dispatch.common.fork import after_fork_in_child
from vllm_fl.dispatch.common.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping

    from vllm_fl.dispatch.types import Origin

logger = get_logger("vllm_fl.dispatch.manager")


class Failures:
    """Of one manager.

    Args:
        choices_change: called with the operator whose choice has changed, None for any.
        origin_of: says who registered an implementation.
    """

    def __init__(
        self,
        choices_change: Callable[[str | None], None],
        origin_of: Callable[[str, str], Origin | None],
    ) -> None:
        self._choices_change = choices_change
        self._origin_of = origin_of
        self._lock = ForkSafeLock()
        #: By operator, what was set aside and what it raised; another object after each change.
        self.by_operator: Mapping[str, Mapping[str, str]] = {}
        #: By operator, what came of an implementation's first calls in a layer.
        self.trials: Mapping[str, Mapping[str, str]] = {}
        self._proven: set[tuple[str, str, tuple[bool, ...]]] = set()
        self._bad_answers: set[tuple[str, str]] = set()
        after_fork_in_child(self._forget_the_parent)

    def _forget_the_parent(self) -> None:
        self.by_operator, self.trials = {}, {}
        self._proven, self._bad_answers = set(), set()

    def forget(self) -> None:
        """Forget what was set aside and tried; a new policy was set."""
        with self._lock:
            self.by_operator, self.trials = {}, {}

    def clear(self, op_name: str | None) -> None:
        """Forget what was set aside, of one operator or of all."""
        with self._lock:
            left = self.by_operator if op_name else {}
            self.by_operator = {op: ids for op, ids in left.items() if op != op_name}
        self._choices_change(op_name)

    def is_set_aside(self, op_name: str, impl_id: str) -> bool:
        """Whether an implementation was set aside for an operator; for each call."""
        return impl_id in self.by_operator.get(op_name, ())

    def set_aside(self, op_name: str, impl_id: str, error: BaseException) -> None:
        """Do not choose an implementation for an operator again; warn once."""
        reason = describe(error)
        with self._lock:
            known = self.by_operator.get(op_name, {})
            if impl_id in known:
                return
            self.by_operator = {**self.by_operator, op_name: {**known, impl_id: reason}}
        self._choices_change(op_name)
        logger.warning(
            "%s raised for %s and is set aside; the next candidate ran on the same arguments. "
            "`clear_failed_impls(%r)` tries it again. It was: %s",
            impl_id,
            op_name,
            op_name,
            reason,
            exc_info=error if is_loggable(error) else None,
        )

    def bad_answer(self, op_name: str, impl_id: str, answer: str) -> None:
        """Say once that a predicate returns what is neither a bool nor a sentence."""
        with self._lock:
            if (op_name, impl_id) in self._bad_answers:
                return
            self._bad_answers.add((op_name, impl_id))
        origin = self._origin_of(op_name, impl_id)
        logger.warning(
            "the predicate of %s%s for %s returned %s. It must return True, or a sentence that says why not; "
            "this counts as a refusal. Report it to its authors.",
            impl_id,
            f" ({origin})" if origin else "",
            op_name,
            answer,
        )

    def is_proven(self, op_name: str, impl_id: str, kind: tuple[bool, ...] = ()) -> bool:
        """Whether an implementation has succeeded once in this process.

        Args:
            op_name: the operator.
            impl_id: the implementation.
            kind: which of the optional tensors that make two operators of one are given.
        """
        return (op_name, impl_id, kind) in self._proven

    def prove(self, op_name: str, impl_id: str, kind: tuple[bool, ...] = ()) -> None:
        """Note an implementation's first success; see :meth:`is_proven`."""
        self._proven.add((op_name, impl_id, kind))

    def note_trial(self, op_name: str, impl_id: str, what: str) -> None:
        """Let every later decision say what came of an implementation's first calls."""
        with self._lock:
            self.trials = {**self.trials, op_name: {**self.trials.get(op_name, {}), impl_id: what}}
