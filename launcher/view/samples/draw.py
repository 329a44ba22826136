"""Prints samples: readable at 80 columns in a terminal, unwrapped lines elsewhere, JSON for programs."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from launcher.report import make_console, reporting
from launcher.view.samples.choose import SampleQuery, SampleSelection, choose
from launcher.view.status import current_run
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_OK
from tandem_files.metrics_file import is_weighted, score_text
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import StoredSample, plain, taken_columns

# Characters of a text that are shown without --full: the beginning and the end, where an answer is.
_HEAD, _TAIL = 800, 400
_INDENT = 4
# Columns of the row in its line, and characters of each.
_MOST_COLUMNS, _VALUE = 6, 40
_MARKS = "⟦⟧"
_USE_STYLES = {"trained": "green", "dropped": "yellow", "masked": "yellow", "unscored": "red"}


@reporting(usage=(PermissionError,))
def samples_command(run_dir: Path | None, wanted: SampleQuery, *, full: bool, as_json: bool) -> int:
    """Run `tandem samples`. run_dir: None: the current run. Returns: the exit code."""
    run_dir = current_run() if run_dir is None else run_dir
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} does not exist; give a run's folder, e.g. `tandem samples runs/arithmetic`")
    chosen = choose(SampleFolder(run_dir), wanted)
    if as_json:
        console = make_console()
        for sample in chosen.samples:
            console.file.write(json.dumps(plain(sample)) + "\n")
    else:
        draw(make_console(), run_dir, chosen, full=full)
    return EXIT_OK


def draw(console: Console, run_dir: Path, chosen: SampleSelection, *, full: bool) -> None:
    """Print chosen samples.

    Args:
        full: print whole texts.
    """
    console.print(Text(overview(run_dir, chosen), style="bold"), soft_wrap=not console.is_terminal)
    if not chosen.samples:
        console.print(Text("no sample fits"))
    for sample in chosen.samples:
        console.print()
        for part in _sample(sample, full=full):
            _print(console, part)
    more = chosen.fitting - len(chosen.samples)
    if more > 0:
        console.print(Text(f"\n{more} more (--best, --worst, --longest, --shortest K choose others)", style="dim"))


def overview(run_dir: Path, chosen: SampleSelection) -> str:
    """Say how many samples fit the filters, and summarize those that they were chosen from."""
    heads = chosen.heads
    rewards = [head.reward for head in heads if head.reward is not None]
    groups = len({head.group_id for head in heads})
    text = f"{run_dir}, iteration {chosen.iteration}, {chosen.kind}: "
    if chosen.filters:
        text += f"{chosen.fitting} of {len(heads)} samples fit {', '.join(chosen.filters)}; all "
    text += f"{len(heads)} samples of {groups} groups"
    if heads:
        cut = sum(head.finish_reason == "length" for head in heads) / len(heads)
        tokens = sum(head.num_tokens for head in heads) / len(heads)
        if rewards:
            text += f", reward {score_text(sum(rewards) / len(rewards))} ({min(rewards):.3g} to {max(rewards):.3g})"
        text += f", {tokens:.1f} tokens, {cut:.0%} cut off"
        if failed := sum(bool(head.errors) for head in heads):
            text += f", {failed} with a failed score (--failed)"
    others = [kind for kind in chosen.kinds if kind != chosen.kind]
    return text + (f"; also stored: {', '.join(others)} (--kind)" if others else "")


def visible(text: str) -> str:
    r"""Replace control characters, which could move a terminal's cursor or hide text, by escapes.

    >>> visible("a\tb\x1b[2Jc")
    'a\tb\\x1b[2Jc'
    """
    return "".join(one if one in "\n\t" or _is_plain(one) else one.encode("unicode_escape").decode() for one in text)


def _is_plain(letter: str) -> bool:
    return letter.isprintable() or (letter.isspace() and ord(letter) > 0x9F and letter not in "\u2028\u2029")


def shortened(text: str, *, full: bool) -> str:
    """Leave out the middle of a long text, unless `full`."""
    left_out = len(text) - _HEAD - _TAIL
    if full or left_out <= 0:
        return text
    return f"{text[:_HEAD]}\n[... {left_out:,} characters left out, --full shows them ...]\n{text[-_TAIL:]}"


def _sample(sample: StoredSample, *, full: bool) -> Iterator[Text | tuple[str, str]]:
    use = sample.use, _USE_STYLES.get(sample.use, "dim")
    yield Text.assemble((sample.sample_id, "bold cyan"), f"  {_figures(sample)}  ", use)
    for name, why in sample.errors.items():
        yield Text(f"  {visible(name)} failed: {shortened(visible(why), full=full)}", style="red")
    completion = (
        f"completion ({_MARKS[0]}not sampled by the policy{_MARKS[1]})" if sample.masked_spans else "completion"
    )
    for title, text in (("prompt", sample.prompt), (completion, _marked(sample)), ("answer", sample.answer)):
        yield title, shortened(visible(text), full=full)
    if sample.transcript:
        yield "turns", turns(sample.transcript, full=full)
    columns = taken_columns(sample)
    if columns:
        yield "of the row, for rewards", _listed(columns, full=full)


def turns(transcript: str, *, full: bool) -> str:
    """Return a line for each message of an episode, with what the policy's turns got, and why it has ended."""
    said, place, lines = json.loads(transcript), 0, list[str]()
    for message in said["messages"]:
        got = ""
        if message["role"] == "assistant":
            reward = said["rewards"][place] if place < len(said["rewards"]) else None
            place, got = place + 1, "" if reward is None else f" (got {score_text(reward)})"
        calls = [f"{call['function']['name']}({json.dumps(call['function']['arguments'])})"
                 for call in message.get("tool_calls", ())]  # fmt: skip
        text = " ".join([*filter(None, [message.get("content")]), *calls])
        branch = "(another context) " if message.get("branch") else ""
        lines.append(f"{branch}{message['role']}{got}: {visible(text) if full else _on_a_line(text)}")
    return "\n".join([*lines, f"ended: {said['end']}" + (f", {visible(said['error'])}" if said["error"] else "")])


def _marked(sample: StoredSample) -> str:
    """Return the completion, with marks around what the policy has not sampled."""
    text, begin, parts = sample.completion, 0, list[str]()
    for span in sample.masked_spans:
        parts += [text[begin : span.text_start], _MARKS[0], text[span.text_start : span.text_end], _MARKS[1]]
        begin = span.text_end
    return "".join([*parts, text[begin:]])


def _listed(columns: Mapping[str, str], *, full: bool) -> str:
    """Return columns in one short line, unless `full`."""
    found = [f"{visible(name)}: {visible(text) if full else _on_a_line(text)}" for name, text in columns.items()]
    if full:
        return "\n".join(found)
    more = len(found) - _MOST_COLUMNS
    return ", ".join(found[:_MOST_COLUMNS]) + (f" and {more} more (--full)" if more > 0 else "")


def _on_a_line(text: str) -> str:
    """Return the beginning of a text, in one line."""
    line = visible(" ".join(text[: 2 * _VALUE].split()))
    return line if len(line) <= _VALUE and len(text) <= 2 * _VALUE else f"{line[: _VALUE - 3]}..."


def _figures(sample: StoredSample) -> str:
    failed, scores = sample.errors, sample.reward_parts
    parts = ", ".join(f"{visible(name)} {'failed' if name in failed else f'{scores[name]:.3g}'}" for name in scores)
    parts = f"unweighted: {parts}" if is_weighted(sample.reward, sample.reward_parts.values()) and parts else parts
    reward = "no reward" if sample.reward is None else f"reward {score_text(sample.reward)}"
    figures = [reward + (f" ({parts})" if parts else "")]
    if sample.advantage is not None:
        figures.append(f"advantage {sample.advantage:+.3f}")
    ending = "cut off" if sample.finish_reason == "length" else sample.finish_reason
    figures.append(f"{sample.num_tokens} tokens, {ending}")
    figures.append(_versions(sample))
    return "  ".join(figures)


def _versions(sample: StoredSample) -> str:
    if not sample.version_spans:
        return f"version {sample.policy_version}"
    starts = [0, *(span.end for span in sample.version_spans)]
    spans = zip(sample.version_spans, starts, strict=False)
    return "versions " + ", ".join(f"{span.policy_version} (tokens {start + 1} to {span.end})" for span, start in spans)


def _print(console: Console, part: Text | tuple[str, str]) -> None:
    if isinstance(part, Text):
        console.print(part, soft_wrap=not console.is_terminal)
        return
    title, text = part
    console.print(Text(f"  {title}", style="dim"))
    if console.is_terminal:
        console.print(Padding(Text(text), (0, 0, 0, _INDENT)), soft_wrap=False)
    else:
        console.print(Text("\n".join(" " * _INDENT + line for line in text.split("\n"))))
