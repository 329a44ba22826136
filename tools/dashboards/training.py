"""The dashboard "Training": what the policy learns, and whether what it learns from can be trusted."""

from tools.dashboards.panels import COORDINATOR, TRAINER, Board, Panel, Row, Series, Unit, mean


def _gauges(*named: tuple[str, str]) -> tuple[Series, ...]:
    """Gauges of the coordinator, each with its legend."""
    return tuple(Series(expr=f"{metric}{{{COORDINATOR}}}", legend=legend) for metric, legend in named)


def _panel(title: str, help: str, *named: tuple[str, str], unit: Unit = "short", logarithmic: bool = False) -> Panel:
    return Panel(title=title, help=help, unit=unit, series=_gauges(*named), logarithmic=logarithmic)


_LEARNING = Row(
    title="Learning",
    panels=(
        _panel(
            "Reward",
            "Of the samples of the last iteration.",
            ("tandem_reward_mean", "mean"),
            ("tandem_reward_std", "standard deviation"),
        ),
        _panel(
            "Held-out accuracy",
            "Greedy, last measured.",
            ("tandem_heldout_accuracy_ratio", "accuracy"),
            unit="percentunit",
        ),
        _panel("Loss", "Of the last step.", ("tandem_loss", "loss")),
        _panel(
            "Entropy",
            "Per token, over the full vocabulary. Towards 0: nothing new is tried. Rising without end: noise.",
            ("tandem_entropy", "entropy"),
            unit="nats",
        ),
        _panel(
            "KL",
            "k3 estimate of KL(old || new) per trained token of the last step: how far one step moves the policy.",
            ("tandem_kl_old", "KL(old || new)"),
            unit="nats",
        ),
        _panel(
            "Clip fractions",
            "Share of trained tokens whose ratio was clipped at each bound.",
            ("tandem_clip_fraction_low_ratio", "low"),
            ("tandem_clip_fraction_high_ratio", "high"),
            unit="percentunit",
        ),
        _panel("Gradient norm", "Before clipping.", ("tandem_grad_norm", "norm"), logarithmic=True),
        _panel(
            "Zero-variance groups",
            "Share of groups whose rewards are all equal: nothing is learnt from them.",
            ("tandem_zero_variance_ratio", "zero variance"),
            unit="percentunit",
        ),
        Panel(
            title="Train steps",
            help="By result; not_finite and failed steps change no weights.",
            unit="short",
            series=(
                Series(
                    expr=f"sum by (result) (increase(tandem_train_steps_total{{{TRAINER}}}[$window]))",
                    legend="{{result}}",
                ),
            ),
        ),
    ),
)
_SAMPLES = Row(
    title="Samples",
    panels=(
        _panel("Lengths", "Mean completion length, in tokens.", ("tandem_response_length_tokens", "mean"), unit="none"),
        _panel(
            "Truncated",
            "Share of completions cut off by grpo.max_new_tokens.",
            ("tandem_truncated_ratio", "truncated"),
            unit="percentunit",
        ),
        _panel(
            "Mismatch",
            "|log pi_trainer - log pi_engine| of the same tokens, and grpo.logprob_diff_limit.",
            ("tandem_logprob_abs_diff_max", "max"),
            ("tandem_logprob_abs_diff_mean", "mean"),
            ("tandem_logprob_diff_limit", "limit"),
            unit="nats",
            logarithmic=True,
        ),
        _panel(
            "Staleness",
            "Age of the oldest sample, in versions; 0 when generation waits for the sync.",
            ("tandem_staleness_versions", "oldest"),
            unit="none",
        ),
        Panel(
            title="Left out and failed",
            help="Groups without variance that were dropped, completions whose scoring failed, calls made up for.",
            unit="short",
            series=tuple(
                Series(expr=f"sum (increase({metric}{{{COORDINATOR}}}[$window]))", legend=legend)
                for metric, legend in (
                    ("tandem_dropped_groups_total", "dropped groups"),
                    ("tandem_reward_errors_total", "scoring errors"),
                    ("tandem_generate_retries_total", "retried calls"),
                )
            ),
        ),
        Panel(
            title="Warnings",
            help="By kind; the coordinator's log has their words.",
            unit="short",
            series=(
                Series(
                    expr=f"sum by (kind) (increase(tandem_warnings_total{{{COORDINATOR}}}[$window]))", legend="{{kind}}"
                ),
            ),
        ),
    ),
)
_TIME = Row(
    title="Time",
    panels=(
        Panel(
            title="Where an iteration's time goes",
            help="Mean seconds of each part.",
            unit="s",
            stacked=True,
            series=(
                Series(
                    expr=mean("tandem_iteration_seconds", f'{COORDINATOR}, part!="total"', "part"), legend="{{part}}"
                ),
            ),
        ),
        Panel(
            title="Where a train step's time goes",
            help="Mean seconds of each part, on the trainer.",
            unit="s",
            stacked=True,
            series=(
                Series(expr=mean("tandem_train_step_seconds", f'{TRAINER}, part!="total"', "part"), legend="{{part}}"),
            ),
        ),
        _panel(
            "Overhead",
            "Share of an iteration outside the engine's and the trainer's computation.",
            ("tandem_overhead_ratio", "overhead"),
            unit="percentunit",
        ),
        _panel("Iterations", "Completed.", ("tandem_iteration", "iteration"), unit="none"),
        _panel("Tokens per second", "Of the last iteration.", ("tandem_tokens_per_second", "tokens/s"), unit="none"),
        Panel(
            title="Since something moved",
            help="Seconds since a part of an iteration last began or ended.",
            unit="s",
            series=(
                Series(expr=f"time() - tandem_last_progress_timestamp_seconds{{{COORDINATOR}}}", legend="standstill"),
            ),
        ),
    ),
)

BOARD = Board(
    uid="tandem-training",
    title="Tandem: training",
    help="What the policy learns, from what, and where the time goes.",
    rows=(_LEARNING, _SAMPLES, _TIME),
)
