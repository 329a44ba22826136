"""A reward model as a service: SGLang runs a model with a classification head, and its score of the text is the reward.

    TANDEM_GRPC_PORT=50062 python examples/reward_model/server.py MODEL_FOLDER

The folder holds a Hugging Face model for sequence classification with one label (LlamaForSequenceClassification, ...)
and its tokenizer. Without a GPU SGLang runs on the CPU, by Tandem's platform for it (rollout_service/sglang_cpu).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reward_service import NotScored, RewardSample, RewardScorer, run_reward_server

# SGLang sizes its cache by the free memory of the machine unless it is told.
_CACHE_TOKENS = 16_384


class RewardModel(RewardScorer):
    """The model's score of prompt and completion, as its own tokenizer reads them."""

    name = "reward-model"
    max_batch_size = 64

    def __init__(self, folder: Path) -> None:
        import sglang
        from transformers import AutoTokenizer

        self.version = folder.name
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._engine = sglang.Engine(
            model_path=str(folder),
            is_embedding=True,
            dtype="float32",
            max_total_tokens=_CACHE_TOKENS,
            # The score of a text must not depend on what came before it.
            disable_radix_cache=True,
            log_level="warning",
        )

    def score(self, samples: Sequence[RewardSample]) -> list[float | NotScored]:
        texts = [sample.prompt + sample.completion for sample in samples]
        lengths = [len(self._tokenizer(text).input_ids) for text in texts]
        fits = [place for place, length in enumerate(lengths) if 0 < length <= _CACHE_TOKENS]
        answers = self._engine.encode([texts[place] for place in fits]) if fits else []
        values = {place: float(answer["embedding"][0]) for place, answer in zip(fits, answers, strict=True)}
        return [values.get(place, NotScored(f"its {length} tokens do not fit")) for place, length in enumerate(lengths)]


def main() -> int:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "config.json").is_file():
        print(__doc__, file=sys.stderr)
        return 2
    # Here and not in `load`: SGLang's engine sets signal handlers, which only the main thread may.
    model = RewardModel(Path(sys.argv[1]))
    return run_reward_server(lambda: model)


# SGLang starts processes that import this file.
if __name__ == "__main__":
    sys.exit(main())
