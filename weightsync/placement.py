"""How a rule's parts are cut over tensor-parallel ranks: what both engines do alike."""

from weightsync.layout import Piece, exact_share
from weightsync.mapping import Placement, Rule
from weightsync.model_spec import ModelSpec


def part_shape(rule: Rule, part: int, spec: ModelSpec) -> tuple[int, int]:
    """[rows, cols] of a canonical tensor."""
    return spec.size(rule.parts[part].rows), spec.size(rule.parts[part].cols)


def is_vector(rule: Rule) -> bool:
    """Whether the engines hold the parameter as a vector."""
    return rule.parts[0].cols == "one"


def replicated(rule: Rule, spec: ModelSpec, tp: int) -> tuple[tuple[int, int], list[Piece]]:
    """Local [rows, cols] and pieces of a parameter that every rank has whole."""
    rows, cols = part_shape(rule, 0, spec)
    pieces = [Piece(tp_rank=r, part=0, row=0, rows=rows, col=0, cols=cols, param_row=0) for r in range(tp)]
    return (rows, cols), pieces


def split_columns(rule: Rule, spec: ModelSpec, tp: int) -> tuple[tuple[int, int], list[Piece]]:
    """Each rank has a block of columns (row-parallel linear layers)."""
    rows, cols = part_shape(rule, 0, spec)
    share = exact_share(cols, tp, f"{rule.parts[0].cols} size of {rule.parts[0].name}")
    pieces = [Piece(tp_rank=r, part=0, row=0, rows=rows, col=r * share, cols=share, param_row=0) for r in range(tp)]
    return (rows, share), pieces


def split_gate_up(rule: Rule, spec: ModelSpec, tp: int) -> tuple[tuple[int, int], list[Piece]]:
    """[gate shard | up shard] on each rank."""
    rows, cols = part_shape(rule, 0, spec)
    share = exact_share(rows, tp, "FFN size")
    pieces = [
        Piece(tp_rank=r, part=part, row=r * share, rows=share, col=0, cols=cols, param_row=part * share)
        for r in range(tp)
        for part in range(2)
    ]
    return (2 * share, cols), pieces


def split_vocabulary(rule: Rule, spec: ModelSpec, tp: int, padded_rows: int) -> tuple[tuple[int, int], list[Piece]]:
    """Blocks of rows of a padded vocabulary; padding is not canonical, so the last pieces may be short or empty."""
    rows, cols = part_shape(rule, 0, spec)
    share = exact_share(padded_rows, tp, "padded vocabulary size")
    pieces = [
        Piece(
            tp_rank=r, part=0, row=r * share, rows=min(rows, (r + 1) * share) - r * share, col=0, cols=cols, param_row=0
        )
        for r in range(tp)
    ]
    return (share, cols), pieces


SAME_ON_BOTH_SIDES = {
    Placement.REPLICATED: replicated,
    Placement.COLUMNS: split_columns,
    Placement.GATE_UP: split_gate_up,
}
