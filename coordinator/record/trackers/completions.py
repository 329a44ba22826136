"""A few completions of an iteration, for trackers that are asked to show them (`trackers: [{completions: 8}]`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from coordinator.record.sinks import FinishedIteration
from tandem_clients.flow import Generation, GroupScores
from tandem_files.samples.schema import TRAIN
from tandem_files.tokenizer import TextCodec

# Most characters of a prompt or a completion: trackers keep what they get, and a run has thousands of iterations.
MOST_CHARS = 4000
_LEFT_OUT = "\n[...]\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A completion as a tracker shows it; the fields are the columns of its table."""

    # i12.g3.row77#5, and `train` or the name of the evaluation set.
    sample: str
    kind: str
    prompt: str
    completion: str
    answer: str
    # The weighted sum; None: it has none.
    reward: float | None
    # `math_verify 1, format 0.5`: unweighted, of the rewards that apply.
    scores: str


COLUMNS = tuple(one.name for one in fields(Shown))


def shown_of(finished: FinishedIteration, number: int, codec: TextCodec) -> list[Shown]:
    """Choose completions of an iteration and of its evaluations: of each the worst, the best, and some between them.

    Args:
        number: of each.
    """
    record = finished.record
    found = [] if record is None else [*_shown(TRAIN, record.generation, record.scored, number, codec)]
    for evaluated in finished.evaluated:
        found += _shown(evaluated.name, evaluated.generation, evaluated.scored, number, codec)
    return found


def _shown(kind: str, generation: Generation, scored: GroupScores, number: int, codec: TextCodec) -> Iterator[Shown]:
    rewards_S, present_S = scored.rewards_PG.ravel(), scored.present_PG.ravel()
    order = np.argsort(np.where(present_S, rewards_S, -np.inf), kind="stable")
    chosen = order[np.unique(np.linspace(0, order.size - 1, min(number, order.size)).round().astype(int))]
    samples = [(group, index) for group in generation.groups for index in range(len(group.completions))]
    for place in chosen.tolist():
        group, index = samples[place]
        prompt, completion = codec.decode_all([group.prompt.token_ids, group.completions[index].token_ids])
        values = {name: float(values_PG.ravel()[place]) for name, values_PG in scored.parts.items()}
        yield Shown(
            sample=group.sample_id(index),
            kind=kind,
            prompt=_shortened(prompt),
            completion=_shortened(completion),
            answer=_shortened(group.prompt.answer),
            reward=float(rewards_S[place]) if present_S[place] else None,
            scores=", ".join(f"{name} {value:.4g}" for name, value in values.items() if not np.isnan(value)),
        )


def _shortened(text: str) -> str:
    """Leave out the middle of a long text: an answer is at its end."""
    half = (MOST_CHARS - len(_LEFT_OUT)) // 2
    return text if len(text) <= MOST_CHARS else f"{text[:half]}{_LEFT_OUT}{text[-half:]}"


def as_markdown(shown: Sequence[Shown]) -> list[str]:
    """Return a text of each completion; what a model wrote stands in blocks that Markdown does not read."""
    texts = []
    for one in shown:
        reward = "no reward" if one.reward is None else f"reward {one.reward:.4g}"
        blocks = [
            f"{name}:\n\n" + "\n".join(f"    {line}" for line in text.split("\n"))
            for name, text in (("prompt", one.prompt), ("completion", one.completion), ("answer", one.answer))
        ]
        texts.append("\n\n".join([f"**{one.sample}** ({one.kind}): {reward}; {one.scores}", *blocks]))
    return texts
