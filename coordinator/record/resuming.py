"""What a run that is resumed must have in common with its checkpoint: its model, and the order of its prompts. Pure.

A position in the data means nothing in another order, and the trainer's state nothing for another model. All other
settings may change.
"""

from coordinator.data.prompts import PromptSet
from coordinator.record.state import DataOrder, RunState
from tandem_config.schema import RunConfig


def order_of(config: RunConfig, train: PromptSet) -> DataOrder:
    """The order of a configuration's prompts."""
    return DataOrder(seed=config.run.seed, shuffle=config.data.shuffle, prompts_digest=train.digest())


def order_differences(saved: RunState, order: DataOrder, num_prompts: int) -> list[str]:
    """What differs between a checkpoint's state and a run: `run.seed: 0 in the checkpoint, 1 in the run`, ...

    Args:
        num_prompts: usable prompts of the run's data.train.
    """
    if saved.order is None:
        return []
    there, here = "in the checkpoint", "in the run"
    found = [
        f"{key}: {old} {there}, {new} {here}"
        for key, old, new in (
            ("run.seed", saved.order.seed, order.seed),
            ("data.shuffle", saved.order.shuffle, order.shuffle),
        )
        if old != new
    ]
    if saved.order.prompts_digest != order.prompts_digest:
        found.append(
            f"data.train: other prompts than those of the checkpoint ({saved.cursor.num_prompts} usable ones "
            f"{there}, {num_prompts} {here}; or other texts, answers, tokens or order)"
        )
    return found
