"""SGLang's Engine with the two parts exchanged that it lets subclasses exchange."""

from typing import Any

from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager

from rollout_service.sglang_engine.dispatch import GroupTokenizerManager


def _init_group_manager(server_args: Any, port_args: Any) -> Any:
    return init_tokenizer_manager(server_args, port_args, GroupTokenizerManager)


class TokenEngine(Engine):
    """Token ids in, token ids out."""

    init_tokenizer_manager_func = staticmethod(_init_group_manager)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        # With skip_tokenizer_init the schedulers answer the TokenizerManager directly: the detokenizer would be a
        # process of 600 MiB and seconds of imports that nobody talks to.
        return [], []


def launch_engine(arguments: dict[str, Any]) -> TokenEngine:
    """Start the processes and wait until they can generate. Raises: RuntimeError: a rank did not come up."""
    return TokenEngine(**arguments)
