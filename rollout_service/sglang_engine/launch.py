"""SGLang's Engine with another TokenizerManager and without detokenizer."""

from typing import Any

from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager

from rollout_service.sglang_engine.dispatch import GroupTokenizerManager


def _init_group_manager(server_args: Any, port_args: Any) -> Any:
    return init_tokenizer_manager(server_args, port_args, GroupTokenizerManager)


class TokenEngine(Engine):
    """An Engine that works on token ids only."""

    init_tokenizer_manager_func = staticmethod(_init_group_manager)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        # With skip_tokenizer_init the schedulers answer the TokenizerManager directly: the detokenizer would be a
        # unused process of 600 MiB and seconds of imports.
        return [], []


def launch_engine(arguments: dict[str, Any]) -> TokenEngine:
    """Start the processes and wait until they can generate. Raises: RuntimeError: a rank did not start."""
    return TokenEngine(**arguments)
