"""Warns that a model's chat template is not applied: Tandem trains on the prompts of the data as they are."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_files.data_rows import Row

# Markers of turns: <|im_start|>, <|start_header_id|>, <start_of_turn>, [INST], <｜User｜>.
_MARK = re.compile(r"<[|｜][^<>{}'\"\s]+[|｜]>|<(?:start|end)_of_turn>|\[/?INST\]")


def check_template(config: RunConfig, rows: Sequence[Row], *, key: str) -> Iterator[ConfigProblem]:
    """Warn if the model has a chat template and prompts contain none of its markers.

    Args:
        key: the rows' key in the configuration.
    """
    folder = config.model.tokenizer_path or config.model.path
    marks = sorted(set(_MARK.findall(_template(folder))))
    if not marks:
        return
    plain = [row.number for row in rows if not any(mark in row.prompt for mark in marks)]
    if plain:
        path = config.data.train if key == "data.train" else config.data.heldout
        named = ", ".join(marks[:3]) + (", ..." if len(marks) > 3 else "")
        yield ConfigProblem(
            key=key,
            value=f"{path}:{plain[0]}",
            message=f"{folder} has a chat template, and Tandem applies none: {len(plain)} of {len(rows)} prompts hold "
            f"none of its {named}, so a model that was tuned on it is trained on text that it has never seen",
            suggestion="render the prompts first: tokenizer.apply_chat_template(messages, add_generation_prompt=True, "
            "tokenize=False). For a base model, ignore this",
            severity="warning",
        )


def _template(folder: Path) -> str:
    """Return the text of all chat templates of the folder; "" if it has none that can be read."""
    texts: list[str] = []
    try:
        plain = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]
        texts.extend(file.read_text(encoding="utf-8") for file in plain if file.is_file())
        within = [folder / name for name in ("chat_template.json", "tokenizer_config.json")]
        texts.extend(_in_json(json.loads(file.read_text(encoding="utf-8"))) for file in within if file.is_file())
    except (OSError, ValueError):
        pass  # Tandem does not use these files, so an unreadable one must not stop the run
    return "\n".join(texts)


def _in_json(content: object) -> str:
    template = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(template, list):
        return "\n".join(str(entry.get("template", "")) for entry in template if isinstance(entry, dict))
    return template if isinstance(template, str) else ""
