"""Renders, parses and bridges with PyPI's `renderers`; the oracle's interpreter runs it on cases of a test.

`python -m tests.contract.turns_oracle FOLDER`: reads tokenizer.json, oracle.json and cases.jsonl, writes answers.jsonl.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def _renderer(tokenizer: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Make the oracle's renderer. Returns: it, and the one whose bridge knows the template's turns."""
    configs = importlib.import_module("renderers.configs")
    renderers = importlib.import_module("renderers")

    def make(name: str, **options: Any) -> Any:
        return getattr(renderers, f"{name}Renderer")(tokenizer, getattr(configs, f"{name}RendererConfig")(**options))

    bridging = make(settings["oracle"], thinking_retention="all", **settings["arguments"])
    # A model that has no renderer of its own is rendered by transformers; its turns end as those of a known one.
    return (make("Default") if settings["is_default"] else bridging), bridging


def _answer(tokenizer: Any, renderer: Any, bridging: Any, case: dict[str, Any], arguments: dict[str, Any]) -> Any:
    if "sampled" not in case:
        options = {"tools": case["tools"], "add_generation_prompt": True}
        own = tokenizer.apply_chat_template(case["messages"], tokenize=True, return_dict=False, **options, **arguments)
        return {"rendered": renderer.render_ids(case["messages"], **options), "template": own}
    parsed = bridging.parse_response(case["sampled"], tools=case["tools"], prompt_ids=case["held"])
    calls = [[call.name, call.arguments] if call.status.name == "OK" else None for call in parsed.tool_calls]
    bridged = bridging.bridge_to_next_turn(case["held"], case["sampled"], case["follow"], tools=case["tools"])
    return {"calls": calls, "bridged": None if bridged is None else bridged.token_ids}


def main(folder: Path) -> None:
    """Answer all cases of a folder."""
    transformers = importlib.import_module("transformers")
    settings = json.loads((folder / "oracle.json").read_text(encoding="utf-8"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), clean_up_tokenization_spaces=False, **settings["special_tokens"]
    )
    tokenizer.chat_template = settings["template"]
    renderer, bridging = _renderer(tokenizer, settings)
    with (folder / "cases.jsonl").open(encoding="utf-8") as cases, (folder / "answers.jsonl").open("w") as answers:
        for line in cases:
            answer = _answer(tokenizer, renderer, bridging, json.loads(line), settings["arguments"])
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
