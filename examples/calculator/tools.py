"""The tool that the policy may call: its schema is made from its signature and docstring (docs/environments.md)."""

import ast
import operator

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MAX_CHARACTERS = 64


def calculate(expression: str) -> str:
    """Calculate a sum, difference or product of integers.

    Args:
        expression: e.g. 47*38+15

    >>> calculate("47*38+15"), calculate("2-3*4"), calculate("47**38"), calculate("47*")
    ('1801', '-10', 'error', 'error')
    """
    try:
        if len(expression) > _MAX_CHARACTERS:
            raise ValueError("too long")
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError):
        return "error"


def _value(node: ast.AST) -> int:
    """Compute a node. Raises: ValueError: it is neither an integer nor an operation of two values."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        found: int = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        return found
    raise ValueError("neither an integer nor an operation")
