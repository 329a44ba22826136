"""Compares the order of a resumed run's prompts with that of its checkpoint.

A position in the data is meaningless in another order. The model must be the same too; all other settings may change.
"""

from coordinator.data.prompts import PromptSet
from coordinator.record.state import DataOrder, RunState
from tandem_config.schema import RunConfig


def order_of(config: RunConfig, train: PromptSet) -> DataOrder:
    """Return what the order of a configuration's prompts depends on."""
    return DataOrder(seed=config.run.seed, shuffle=config.data.shuffle, prompts_digest=train.digest())


def order_differences(saved: RunState, order: DataOrder, num_prompts: int) -> list[str]:
    """List the differences between a checkpoint and a run, e.g. `run.seed: 0 in the checkpoint, 1 in the run`.

    Args:
        num_prompts: usable prompts of the run's data.train.
    """
    if saved.order is None:
        return []
    found = [
        f"{key}: {old} in the checkpoint, {new} in the run"
        for key, old, new in (
            ("run.seed", saved.order.seed, order.seed),
            ("data.shuffle", saved.order.shuffle, order.shuffle),
        )
        if old != new
    ]
    if saved.order.prompts_digest != order.prompts_digest:
        found.append(
            f"data.train: other prompts than those of the checkpoint ({saved.cursor.num_prompts} usable ones "
            f"in the checkpoint, {num_prompts} in the run; or other texts, answers, tokens or order)"
        )
    return found
