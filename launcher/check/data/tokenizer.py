"""Checks the tokenizer: it exists, can be loaded, fits the vocabulary, and has a stop token."""

from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_files.tokenizer import TextCodec, stop_token_ids
from weightsync.model.spec import ModelSpec


def check_tokenizer(config: RunConfig, spec: ModelSpec | None) -> tuple[TextCodec | None, list[ConfigProblem]]:
    """Load the tokenizer. Returns: it, or None, and the problems; (None, []) without the model's `spec`."""
    if spec is None:
        return None, []
    stop_problems = _check_stop(config, spec)
    try:
        return TextCodec.from_folders(config.model.path, config.model.tokenizer_path), stop_problems
    except (OSError, ValueError) as error:
        text = str(error)
    if stop_problems and stop_problems[0].message in text:
        return None, stop_problems
    return None, [_problem(config, text, _hint(text)), *stop_problems]


def _check_stop(config: RunConfig, spec: ModelSpec) -> list[ConfigProblem]:
    try:
        ids = stop_token_ids(config.model.path)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        hint = "add eos_token_id to generation_config.json, or every completion runs to grpo.max_new_tokens"
        return [_problem(config, str(error), hint)]
    beyond = [number for number in ids if not 0 <= number < spec.vocab_size]
    if not beyond:
        return []
    message = f"eos_token_id {beyond[0]} is not in the vocabulary of {spec.vocab_size}"
    return [_problem(config, message, "correct eos_token_id in generation_config.json or config.json")]


def _hint(text: str) -> str:
    if "vocab_size" in text:
        return "use the tokenizer that the model was trained with"
    return "save one with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)`, or set model.tokenizer_path"


def _problem(config: RunConfig, message: str, suggestion: str) -> ConfigProblem:
    folder = config.model.tokenizer_path
    key = "model.path" if folder is None else "model.tokenizer_path"
    value = config.model.path if folder is None else folder
    return ConfigProblem(key=key, value=str(value), message=message, suggestion=suggestion)
