"""The closing summary of a run, from summary.json and metrics.jsonl, and its picture, reward.png."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.report import print_pairs
from tandem_files.metrics_file import Baseline, Heldout, is_weighted, reward_means, score_text
from tandem_files.metrics_table import ACCURACY, REWARD
from tandem_files.run_folder import metrics_rows, read_state, read_summary


def print_summary(console: Console, run_dir: Path) -> None:
    """Print the summary as a short table; figures that were not measured are left out."""
    summary = read_summary(run_dir)
    if summary is None:
        return
    console.print()
    print_pairs(console, summary_lines(summary, metrics_rows(run_dir), run_dir), "bold")


def summary_lines(
    summary: Mapping[str, Any], rows: Sequence[Mapping[str, float | None]], run_dir: Path
) -> list[tuple[str, str]]:
    """Return the (name, text) pairs of the closing table.

    Args:
        summary: content of summary.json.
        rows: rows of metrics.jsonl.
    """
    sync = summary.get("weight_sync") or {}
    candidates = [
        (Heldout.of_state(summary).title, _accuracy(summary)),
        ("rewards", rewards_text(rows)),
        *((f"{name}, {measure}", text) for name, measure, text in _evaluations(summary)),
        ("best policy", _best(summary)),
        ("iterations", _number(summary, "iterations", ".0f")),
        ("wall time", _number(summary, "wall_s", ".1f", " s")),
        ("generated tokens", _number(summary, "generated_tokens", ",.0f")),
        ("trained samples", _number(summary, "trained_samples", ",.0f")),
        ("policy version", _number(summary, "policy_version", ".0f")),
        ("weight sync", _sync(sync)),
        ("bytes per rank", _bytes(sync)),
        ("largest |dlogp|", _number(summary, "logprob_abs_diff_max", ".1e")),
        ("time goes to", _time_shares(rows)),
        ("added by Tandem", _overhead(summary)),
        ("damaged", "; ".join(summary.get("damaged_checkpoints") or [])),
        ("results", str(run_dir)),
        ("final policy", str(run_dir / "hf") if (run_dir / "hf").is_dir() else ""),
        ("reward curve", str(run_dir / "reward.png") if (run_dir / "reward.png").is_file() else ""),
    ]
    return [(name, text) for name, text in candidates if text]


def _number(values: Mapping[str, Any], key: str, form: str, unit: str = "") -> str:
    value = values.get(key)
    return "" if value is None else format(value, form) + unit


def _accuracy(summary: Mapping[str, Any]) -> str:
    before, after = summary.get("initial_accuracy"), summary.get("final_accuracy")
    return (
        ""
        if before is None or after is None
        else f"{score_text(before)} -> {score_text(after)}{_since(summary, 'heldout')}"
    )


def _since(summary: Mapping[str, Any], name: str) -> str:
    """Say since when the figures of a set compare, if a resume has changed it; "" if none has."""
    number = ((summary.get("evaluation") or {}).get("renewed") or {}).get(name)
    return "" if number is None else f" (since iteration {number}, when the set was changed)"


def rewards_text(rows: Sequence[Mapping[str, float | None]]) -> str:
    """Say how the mean of each of several rewards has changed from the first iteration to the last; "" of one."""
    first, last = (reward_means(rows[place]) if rows else {} for place in (0, -1))
    changes = [(name, first.get(name), mean) for name, mean in last.items() if mean is not None]
    text = ", ".join(
        f"{name} {score_text(after)}"
        if before is None or len(rows) == 1
        else f"{name} {score_text(before)} -> {score_text(after)}"
        for name, before, after in changes
    )
    return f"{text} (unweighted)" if text and is_weighted(rows[-1].get(REWARD), last.values()) else text


def _evaluations(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield set, measure, and how it has changed, without the held-out accuracy."""
    evaluation = summary.get("evaluation") or {}
    before = evaluation.get("initial") or {}
    for column, after in (evaluation.get("final") or {}).items():
        name, _, measure = column.removeprefix("eval/").rpartition("/")
        if "@" in measure and "_" not in measure and name != "heldout" and after is not None:
            start = before.get(column)
            text = score_text(after) if start is None else f"{score_text(start)} -> {score_text(after)}"
            yield name, measure, text + _since(summary, name)


def _best(summary: Mapping[str, Any]) -> str:
    best = (summary.get("evaluation") or {}).get("best")
    if best is None:
        return ""
    place = f"after iteration {best['iteration']}" if best["iteration"] else "before the training"
    return f"{place}: {best['metric']} {score_text(best['value'])}"


def _sync(sync: Mapping[str, Any]) -> str:
    if sync.get("total_s_median") is None:
        return ""
    return f"{sync.get('count', 0)} rounds, median {sync['total_s_median']:.3f} s, longest {sync['total_s_max']:.3f} s"


def _bytes(sync: Mapping[str, Any]) -> str:
    if sync.get("bytes_per_rollout_rank") is None:
        return ""
    return f"{sync['bytes_per_rollout_rank']:,} per sync, redundancy {sync.get('redundancy', 0.0):.2f}"


def _time_shares(rows: Sequence[Mapping[str, float | None]]) -> str:
    """Return the shares of all iterations' time: engines' and trainer's own work, then Tandem's overhead by part."""
    total = _sum(rows, "iteration_s")
    if total <= 0.0:
        return ""
    waits = {
        "generation beyond the engine": _sum(rows, "generate_s") - _sum(rows, "engine_s"),
        "training beyond the model": _sum(rows, "train_s")
        + _sum(rows, "reference_s")
        - _sum(rows, "trainer_compute_s"),
    }
    # While an environment answers, the engines' streams are open: their seconds hold its own.
    engine = "engine and environment" if any(row.get("turns_mean") is not None for row in rows) else "engine"
    seconds = {
        engine: _sum(rows, "engine_s"),
        "trainer": _sum(rows, "trainer_compute_s"),
        **waits,
        **{part: _sum(rows, f"{part}_s") for part in ("reward", "batch", "sync", "evaluate", "checkpoint", "export")},
    }
    seconds["other"] = total - sum(seconds.values())
    return ", ".join(f"{part} {value / total:.0%}" for part, value in seconds.items() if value >= 0.005 * total)


def _sum(rows: Sequence[Mapping[str, float | None]], metric: str) -> float:
    return sum(row.get(metric) or 0.0 for row in rows)


def _overhead(summary: Mapping[str, Any]) -> str:
    share = (summary.get("time") or {}).get("overhead_share_median")
    return "" if share is None else f"{share:.1%} of an iteration, median (RPCs, scoring, packing, sync, waiting)"


def plot_rewards(run_dir: Path) -> Path | None:
    """Draw training reward and held-out score over the iterations, from metrics.jsonl, into `<run_dir>/reward.png`.

    Returns: its path, or None if there is nothing to draw.
    """
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
        (REWARD, "training reward, mean", "-"),
        (ACCURACY, f"{heldout.title}, greedy", "o-"),
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
