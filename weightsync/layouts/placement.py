"""Cuts a rule's parts over tensor-parallel ranks, in the ways that both engines have in common."""

from dataclasses import dataclass

from servicekit.errors import ConfigError
from weightsync.families.rule import Placement, Rule
from weightsync.layouts.layout import Piece, PieceArray, exact_share, local_shape, piece_array
from weightsync.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ParameterCut:
    """A parameter cut over ranks: its local [rows, cols] and the pieces of each rank."""

    rows: int
    cols: int
    pieces: PieceArray

    def shape(self, rule: Rule) -> tuple[int, ...]:
        """Return the shape that an engine gives the local parameter."""
        return local_shape(self.rows, self.cols, vector=rule.parts[0].cols == "one")


def part_shape(rule: Rule, part: int, spec: ModelSpec) -> tuple[int, int]:
    """Return (rows, cols) of a canonical tensor. Raises: ConfigError: a symbol that ModelSpec.size does not know."""
    tensor = rule.parts[part]
    try:
        return spec.size(tensor.rows), spec.size(tensor.cols)
    except KeyError as unknown:
        raise ConfigError(f"the rule of {tensor.name} has a size {unknown} that ModelSpec.size does not know") from None


def rule_applies(rule: Rule, spec: ModelSpec, layer: int) -> bool:
    """Whether a layer has the rule's parameter: a mixture of experts may have dense layers too."""
    return rule.layers == "all" or (rule.layers == "experts") == spec.has_experts(layer)


def check_kv_heads(spec: ModelSpec, tp: int) -> None:
    """Check that the ranks divide the KV heads, or share each evenly, as both engines require. Raises: ConfigError."""
    if spec.num_kv_heads % tp != 0 and tp % spec.num_kv_heads != 0:
        raise ConfigError(
            f"number of KV heads = {spec.num_kv_heads} and tensor parallel size {tp}: one must divide the other"
        )


def replicated(rule: Rule, spec: ModelSpec, tp: int) -> ParameterCut:
    """Put the whole parameter on every rank."""
    rows, cols = part_shape(rule, 0, spec)
    pieces = [Piece(tp_rank=r, part=0, row=0, rows=rows, col=0, cols=cols, param_row=0) for r in range(tp)]
    return ParameterCut(rows=rows, cols=cols, pieces=piece_array(pieces))


def split_columns(rule: Rule, spec: ModelSpec, tp: int) -> ParameterCut:
    """Give each rank a block of columns (row-parallel linear layers)."""
    rows, cols = part_shape(rule, 0, spec)
    share = exact_share(cols, tp, f"{rule.parts[0].cols} size of {rule.parts[0].name}")
    pieces = [Piece(tp_rank=r, part=0, row=0, rows=rows, col=r * share, cols=share, param_row=0) for r in range(tp)]
    return ParameterCut(rows=rows, cols=share, pieces=piece_array(pieces))


def split_gate_up(rule: Rule, spec: ModelSpec, tp: int) -> ParameterCut:
    """Give each rank [gate shard | up shard]."""
    rows, cols = part_shape(rule, 0, spec)
    share = exact_share(rows, tp, "FFN size")
    pieces = [
        Piece(tp_rank=r, part=part, row=r * share, rows=share, col=0, cols=cols, param_row=part * share)
        for r in range(tp)
        for part in range(2)
    ]
    return ParameterCut(rows=2 * share, cols=cols, pieces=piece_array(pieces))


def split_vocabulary(rule: Rule, spec: ModelSpec, tp: int, padded_rows: int) -> ParameterCut:
    """Give each rank a block of rows of the padded vocabulary.

    Padding is not canonical, so the last pieces may be short or empty.

    Args:
        padded_rows: rows of the embedding with padding.
    """
    rows, cols = part_shape(rule, 0, spec)
    share = exact_share(padded_rows, tp, "padded vocabulary size")
    pieces = [
        Piece(
            tp_rank=r, part=0, row=r * share, rows=min(rows, (r + 1) * share) - r * share, col=0, cols=cols, param_row=0
        )
        for r in range(tp)
    ]
    return ParameterCut(rows=share, cols=cols, pieces=piece_array(pieces))


SAME_ON_BOTH_SIDES = {
    Placement.REPLICATED: replicated,
    Placement.COLUMNS: split_columns,
    Placement.GATE_UP: split_gate_up,
}
