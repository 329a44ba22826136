"""Reads the chat templates and named special tokens of a tokenizer's folder, as transformers would load them."""

import json
from pathlib import Path
from typing import Any

DEFAULT = "default"


def read_templates(folder: Path) -> dict[str, str]:
    """Return the folder's chat templates by name; {}: it has none.

    Files of their own (chat_template.jinja, additional_chat_templates/) replace those in tokenizer_config.json.

    Raises: OSError; ValueError: a file cannot be read.
    """
    main = folder / "chat_template.jinja"
    found = {DEFAULT: main.read_text(encoding="utf-8")} if main.is_file() else {}
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.name.removesuffix(".jinja")] = file.read_text(encoding="utf-8")
    # chat_template.json is of processors, which some models have in place of the template of their tokenizer.
    return found or _in_json(folder / "tokenizer_config.json") or _in_json(folder / "chat_template.json")


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens that have a name, such as `bos_token`. Raises: OSError; ValueError."""
    config = _json(folder / "tokenizer_config.json")
    entries = dict(config)
    if "added_tokens_decoder" not in config:  # as older releases saved them
        entries.update(_json(folder / "special_tokens_map.json"))
    named = {key: _text(value) for key, value in entries.items() if key.endswith("_token")}
    extra = entries.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update({key: _text(value) for key, value in extra.items()})
    return {key: text for key, text in named.items() if text is not None}


def _in_json(file: Path) -> dict[str, str]:
    template = _json(file).get("chat_template")
    if isinstance(template, str):
        return {DEFAULT: template}
    entries = template if isinstance(template, list) else []
    return {str(entry["name"]): str(entry["template"]) for entry in entries if {"name", "template"} <= set(entry)}


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _text(token: object) -> str | None:
    """Return a token's text: it is saved as text, or as an object with its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
