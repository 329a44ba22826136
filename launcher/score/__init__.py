"""`tandem score`: rewards on completions of one's own. In Python: `from launcher.score import score`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.score.scoring import Report, ScoredCompletion, score

__all__ = ["Report", "ScoredCompletion", "score"]


def __getattr__(name: str) -> Any:
    """Import the rewards when they are asked for: the command line of `tandem --help` needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from launcher.score import scoring

    return getattr(scoring, name)
