"""The manager of the process, and the two lists that every manager follows.

Which one runs
==============

1. The policy in force: the innermost ``policy_context``, else
   ``set_global_policy``, else ``VLLM_FL_CONFIG`` (a YAML file; it replaces the
   environment's variables), else environment variables; each over the active
   vendor's packaged defaults over the built-in ones, key by key and operator by
   operator, unless it says ``defaults: none``. With two available vendors
   neither's packaged defaults apply, nor do those of a vendor that the policy
   denies.
2. The implementations of the operator, minus those that the policy denies,
   minus those that are not available.
3. Their order: the operator's own order where the policy gives one (what it
   does not list is not tried), else the kinds in the order of ``prefer``; inside
   one token by priority, then by ``impl_id``. Tokens: ``flagos``, ``vendor``,
   ``vendor:<name>``, ``reference``, ``impl:<impl_id>``, and ``native``: inside
   vLLM every replaced layer has vLLM's own path as a candidate, the last one
   unless the policy says otherwise.
4. A tuned table, where the policy names one, reorders step 3 for the shapes that
   it has measured (:mod:`vllm_fl.dispatch.tuned`).
5. The first whose ``supports`` agrees runs.

A layer that vLLM leaves to its compiler stays ``native`` unless the policy says
otherwise in so many words (an explicit ``prefer``, order or context) or a tuned
table names its operator.

When one fails
==============

1. "Not for these inputs" moves to the next candidate, for this call only. It is said
   by ``supports``; by ``NotImplementedError`` of an implementation that writes none of
   its arguments; or by ``RefusedBeforeWriting``, whose name promises that nothing was
   written. The promise is the implementation's own: where it calls another operator,
   that one's refusal is an exception like any other.
2. A fault of the caller (arguments that do not bind, an unknown operator) is
   raised as it is.
3. Out of memory, a dead device, a signal: raised as they are, also inside a group, a
   cause or a context. What the devices' libraries say then is a table with its
   sources, ``fatal_errors.json``.
4. Any other exception of an implementation that writes none of its arguments: with
   ``strict`` it is raised; otherwise the next candidate runs, and only if it
   succeeds on the same arguments is the first set aside for that operator (until
   a policy is set or it is cleared), with one warning. If all raise, nothing is
   set aside.
5. After an implementation that writes its arguments the next candidate runs only when
   they can be put back: until its first success, from copies; with and without an
   optional tensor it succeeds apart. Afterwards the exception is raised, with a note.
   ``NotImplementedError`` is such an exception, since torch raises it from the middle
   of a kernel too; until the first success it sets nothing aside.
6. When nothing is left, the first exception is raised, of its own type, with the
   others as notes. A refusal gives way to a later exception that promises less.
7. During tracing or graph capture, and with more than one rank, the exceptions of
   rules 4 and 5 are raised; with ranks, until a first success, ``NotImplementedError``
   is not. With ``strict``, no copies are made, and an implementation that has no
   predicate is called without a guard, so that its refusal is raised too.

The code of the second list is in :mod:`vllm_fl.dispatch.calling.guard`.

Threads
=======

A call takes no lock. It relies on what Python documents, and not on a lock around
the interpreter: reading and binding an attribute, and getting and setting one key of
a dict, are each done as a whole, and a ``ContextVar`` belongs to its thread or task.
Policies, snapshots, decisions and plans are never edited, only replaced. A table is
filled only while the policy, snapshot and failures that it was resolved from are
current, which is checked under the lock; a call that has got a callable keeps it.

No lock is held while somebody else's code runs: an import, ``register()``,
``is_available()``, a predicate, a log handler, the text of an exception. It is run
first, and what it gave is published if nothing has changed meanwhile. The first thread
that needs the plugins, or a backend's answer, gets them; others wait for it without a
lock (:mod:`vllm_fl.dispatch.shared_work`), and where it waits for them in its turn:

* A call for which a plugin waits while it is loaded, from the plugin itself, a module
  that it imports or a thread that it joins, uses what has been registered so far.
* A call from a module that ``is_available()`` imports asks the backend itself, and what
  it hears is not kept. Any other call that the answer waits for raises `DispatchError`.
* A wait that has another cause ends with a `DispatchError` after 120 seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.dispatch.calling.refusal import note_entrance
from vllm_fl.dispatch.common.fork import ForkSafeLock
from vllm_fl.dispatch.op_manager import OpManager
from vllm_fl.dispatch.policy.in_force import check_names_with
from vllm_fl.dispatch.policy.in_force import context

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_fl.dispatch.registry import OpRegistry
    from vllm_fl.dispatch.registry import PluginRecord

# Bound once: Python takes an imported name for a module, and `context.get()` would
# make a bound method for every call.
_context_policy = context.get

_default: OpManager | None = None
_default_lock = ForkSafeLock()


def get_default_manager() -> OpManager:
    """Return the manager of the process, made when first asked for.

    It is what :func:`call_op` and :func:`resolve_op` ask. ``explain(op)`` says what runs
    and why, ``freeze()`` fixes every choice, ``registry`` holds what is registered.
    """
    global _default
    found = _default
    if found is None:
        made = OpManager()
        with _default_lock:
            found = _default = _default or made
    return found


def reset_default_manager() -> None:
    """Forget the manager of the process, its registry, choices and failures.

    The next one discovers the plugins anew. Policies stay as they are.
    """
    global _default
    with _default_lock:
        before, _default = _default, None
    # Whoever still holds it must not keep policies from being changed.
    if before is not None:
        before.thaw()


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator with the implementation that the policy in force chooses.

    ::

        import torch
        from vllm_fl.dispatch import call_op, get_default_manager, with_preference

        x = torch.randn(4, 256)
        y = call_op("silu_and_mul", x)  # T[4, 128]
        print(get_default_manager().explain("silu_and_mul"))  # what runs, and why
        with with_preference("reference"):  # another choice, for this thread or task
            assert torch.allclose(call_op("silu_and_mul", x), y, atol=1e-5)

    ``help(Operators.silu_and_mul)`` says what an operator takes, writes and returns;
    ``help(vllm_fl.dispatch.manager)`` which implementation runs, and what happens when
    one fails. The short of it: of the implementations that are allowed, available and
    ready to take these arguments, the first in the policy's order runs; where it says
    "not for these inputs" or fails before it has written anything, the next one does.

    It follows contexts, policy changes and late registrations at once. What is called
    again and again with one choice is cheaper by :func:`resolve_op`.

    Args:
        op_name: the operator, such as ``"rms_norm"``; ``vllm-fl list ops`` lists them.
        *args: its arguments, in the contract's order.
        **kwargs: its arguments by name.

    Returns:
        What the operator's contract says.

    Raises:
        UnknownOperatorError: no such operator; the message has the nearest name.
        NoImplementationError: nothing can run it; the message says what to install.
        PolicyError: the configuration is wrong; the message names the variable, or the
            file and line.
        TypeError: the arguments do not fit the operator's signature.
        Exception: what the implementation raises; see "When one fails".
    """
    manager = _default or get_default_manager()
    policy = _context_policy()
    if policy is None:
        table = manager._table
    else:
        table = manager._context_tables.get(id(policy)) or manager._context_table(policy)
    return table[op_name](*args, **kwargs)  # as in OpManager.call, without its frame


def resolve_op(op_name: str) -> Callable[..., Any]:
    """Return an operator as a callable that keeps the choice of this moment.

    ::

        import torch
        from vllm_fl.dispatch import resolve_op

        rms_norm = resolve_op("rms_norm")
        x, weight = torch.randn(4, 128), torch.ones(128)
        for _ in range(3):
            y = rms_norm(x, None, weight, 1e-6)

    With ``strict`` and no predicate it is the implementation itself; else it keeps the
    rules of "When one fails". The policy is read here and never in the callable, which
    can be traced. Resolve anew after a change of the policy.

    Args:
        op_name: the operator.

    Returns:
        A callable with the operator's signature.

    Raises:
        UnknownOperatorError: no such operator.
        NoImplementationError: nothing can run it; the message says what to install.
        PolicyError: the configuration is wrong.
    """
    return get_default_manager().resolve(op_name)


def get_discovered_plugins(registry: OpRegistry | None = None) -> list[PluginRecord]:
    """Return what became of every plugin, of the default manager's registry."""
    return list(_of(registry).plugins.values())


def clear_discovered_plugins(registry: OpRegistry | None = None) -> None:
    """Forget which plugins were loaded; what they registered stays.

    To load everything anew, use ``reset_default_manager()``.
    """
    _of(registry).plugins.clear()


def _of(registry: OpRegistry | None) -> OpRegistry:
    return get_default_manager().registry if registry is None else registry


check_names_with(lambda policy: get_default_manager().check_policy(policy))

# An implementation may call another operator: its exceptions pass through this.
note_entrance(call_op)
