"""Draws the curves of several runs into one picture, smoothed, a panel per metric."""

from collections.abc import Sequence
from pathlib import Path

from launcher.view.compare.runs import RunCurves
from servicekit.errors import ConfigError


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Average each value with those before it, exponentially, without a bias to the first, as TensorBoard does.

    Args:
        weight: of the past, 0 (nothing is smoothed) to below 1.

    >>> smoothed([1.0, 2.0, 2.0], 0.5)
    [1.0, 1.6666666666666667, 1.8571428571428572]
    """
    found, past, share = [], 0.0, 0.0
    for value in values:
        past, share = weight * past + (1 - weight) * value, weight * share + 1 - weight
        found.append(past / share)
    return found


def draw(runs: Sequence[RunCurves], metrics: Sequence[str], weight: float, out: Path) -> None:
    """Write the picture; the suffix of `out` says its format.

    Args:
        weight: of smoothing; measured values are faint behind the smoothed ones.
    Raises: ConfigError: it cannot be written, or not in that format.
    """
    try:
        # Imported here: it takes a second, and images have none.
        import matplotlib
    except ImportError:
        raise ConfigError(f"--out {out}: needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(metrics), figsize=(8, 4 * len(metrics)), layout="constrained", squeeze=False)
    formats = figure.canvas.get_supported_filetypes()
    if out.suffix.removeprefix(".") not in formats:
        raise ConfigError(
            f"--out {out}: give it one of the suffixes {', '.join(f'.{name}' for name in sorted(formats))}"
        )
    for axes, metric in zip(panels[:, 0], metrics, strict=True):
        for run in runs:
            points = run.points(metric)
            if not points:
                continue
            iterations, values = zip(*points, strict=True)
            (line,) = axes.plot(iterations, smoothed(values, weight), label=run.label)
            if weight:
                axes.plot(iterations, values, color=line.get_color(), alpha=0.25)
        axes.set(xlabel="iteration", ylabel=metric)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(out, dpi=120)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)
