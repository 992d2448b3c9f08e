"""vllm-fl inside vLLM: the entry point ``vllm.general_plugins: fl``.

vLLM calls :func:`register` in the front end, in the engine core, in every worker
and in the child that inspects a model. Importing this package has no effect.
"""

from __future__ import annotations


def register() -> None:
    """Let vLLM's layers be served by the dispatch.

    It may be called again, and does nothing then.

    Raises:
        PolicyError: the configuration is wrong. A server must not start with
            another choice than the one that was asked for. Whatever else goes
            wrong is one ERROR line, and vLLM runs on its own path.
    """
    from vllm_fl.dispatch.errors import PolicyError

    try:
        from vllm_fl.integration.plugin import install

        install()
    except PolicyError:
        raise
    except Exception as error:  # noqa: BLE001 - our fault must not end somebody's server
        from vllm_fl.integration.log import logger

        logger.error("vllm-fl is off, vLLM runs natively: %s: %s", type(error).__name__, error)
        logger.debug("vllm-fl failed to register", exc_info=True)
