"""Draws reward.png: training reward and held-out score over the iterations of a run."""

from pathlib import Path

from tandem_files.metrics_file import Baseline, Heldout
from tandem_files.run_folder import metrics_rows, read_state


def plot_rewards(run_dir: Path) -> Path | None:
    """Write `<run_dir>/reward.png` from metrics.jsonl. Returns: its path, or None if there is nothing to draw."""
    rows = [row for row in metrics_rows(run_dir) if row.get("iteration") is not None]
    if not rows:
        return None
    # Imported here: matplotlib takes a second, and --help must stay quick.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    state = read_state(run_dir)
    baseline, heldout = Baseline.of_state(state), Heldout.of_state(state)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for metric, label, style in (
        ("reward_mean", "training reward, mean", "-"),
        ("heldout_accuracy", f"{heldout.title}, greedy", "o-"),
    ):
        found = [(row["iteration"] or 0, value) for row in rows if (value := row.get(metric)) is not None]
        points = baseline.begin(metric, found)
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set(xlabel="iteration", ylabel="mean score", title=run_dir.name)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    path = run_dir / "reward.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
