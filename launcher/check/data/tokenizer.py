"""Checks the tokenizer: it exists, can be loaded, fits the vocabulary, and has a stop token."""

from collections.abc import Iterator

from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_files.tokenizer import TextCodec, stop_token_ids
from weightsync.model.spec import ModelSpec


def check_tokenizer(config: RunConfig, spec: ModelSpec | None) -> tuple[TextCodec | None, list[ConfigProblem]]:
    """Load the tokenizer. Returns: it, or None, and the problems; (None, []) without the model's `spec`."""
    if spec is None:
        return None, []
    try:
        codec = TextCodec.from_folders(config.model.path, config.model.tokenizer_path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return None, [
            _problem(config, str(error), _hint(str(error))),
            *_stop_beyond(config, spec, _of_the_model(config)),
        ]
    return codec, [*_stop_beyond(config, spec, codec.stop_token_ids)]


def _of_the_model(config: RunConfig) -> tuple[int, ...]:
    """Read the model's stop tokens, of which more may be wrong than the tokenizer; none if they cannot be read."""
    try:
        return stop_token_ids(config.model.path)
    except (OSError, ValueError, TypeError, AttributeError):
        return ()


def _stop_beyond(config: RunConfig, spec: ModelSpec, ids: tuple[int, ...]) -> Iterator[ConfigProblem]:
    """Find stop tokens beyond the vocabulary: the model's, and those of the configuration."""
    beyond = [number for number in ids if not 0 <= number < spec.vocab_size]
    if beyond:
        message = f"eos_token_id {beyond[0]} is not in the vocabulary of {spec.vocab_size}"
        yield _problem(config, message, "correct eos_token_id in generation_config.json or config.json")
    for number in config.grpo.stop_token_ids:
        if number >= spec.vocab_size:
            yield problem(
                "grpo.stop_token_ids",
                number,
                f"is not in the model's vocabulary of {spec.vocab_size} tokens",
                "ids are in tokenizer.json; or give the token's text in grpo.stop",
            )


def _hint(text: str) -> str:
    if "completions never end" in text:
        return "add eos_token_id to generation_config.json, or every completion runs to grpo.max_new_tokens"
    if "vocab_size" in text:
        return "use the tokenizer that the model was trained with"
    return "save one with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)`, or set model.tokenizer_path"


def _problem(config: RunConfig, message: str, suggestion: str) -> ConfigProblem:
    folder = config.model.tokenizer_path
    key = "model.path" if folder is None else "model.tokenizer_path"
    value = config.model.path if folder is None else folder
    return problem(key, value, message, suggestion)
