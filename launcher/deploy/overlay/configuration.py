"""The run's YAML as pods will read it: `/etc/tandem/run.yaml`, with the files of own code beside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem_config.loading import draft_config
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import split_reference

RUN_FILE = "run.yaml"
# What pods have: the claim, what is in the images, the folder of the ConfigMap.
MODELS, IMAGE, CONFIG = Path("/models"), Path("/opt/tandem"), Path("/etc/tandem")
_LARGEST_CONFIG = 1_000_000  # bytes of a ConfigMap: etcd takes 1 MiB of an object


@dataclass(frozen=True, kw_only=True)
class PodConfiguration:
    """A run's configuration and the files that go with it into the ConfigMap, by name."""

    config: RunConfig | None
    files: dict[str, bytes]
    problems: list[ConfigProblem]


def read_configuration(path: Path) -> PodConfiguration:
    """Read a configuration for pods; every problem that can be seen from here is in `problems`."""
    draft = draft_config(path)
    if draft.config is None:
        return PodConfiguration(config=None, files={}, problems=draft.problems)
    files = {RUN_FILE: path.read_bytes()}
    problems = [*draft.problems, *draft.placed(_paths(draft.config)), *draft.placed(_fleet(draft.config))]
    for key, place in _own_code(draft.config):
        if not place.endswith(".py"):
            continue
        file = Path(place)
        if file.parent == path.absolute().parent and file.is_file():
            files[file.name] = file.read_bytes()
        elif not _in_pods(file):
            advice = f"put it beside {path.name}: it goes into the ConfigMap; or below {MODELS}"
            problems.append(problem(key, file, "is not in the pods", advice))
    size = sum(map(len, files.values()))
    if size > _LARGEST_CONFIG:
        text = f"{size} bytes with its files of own code; a ConfigMap holds {_LARGEST_CONFIG}"
        problems.append(problem(str(path), "", text, f"put the files below {MODELS}"))
    return PodConfiguration(config=draft.config, files=files, problems=problems)


def _own_code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that name users' code, and where it is."""
    named = [("reward.function", getattr(reward, "function", None)) for reward in config.reward]
    if config.environment is not None:
        named += [("environment.function", config.environment.function)]
        named += [("environment.tools", tool) for tool in config.environment.tools]
    yield from ((key, split_reference(reference)[0]) for key, reference in named if reference is not None)


def paths_of(config: RunConfig) -> list[tuple[str, Path]]:
    """List the files and folders that pods read, with the keys that name them, each pair once."""
    paths = {"model.path": config.model.path, "model.tokenizer_path": config.model.tokenizer_path}
    paths |= {"grpo.reference_path": config.grpo.reference_path}
    paths |= {"trainer.initial_checkpoint": config.trainer.initial_checkpoint}
    named = [(key, path) for key, path in paths.items() if path is not None]
    named += [("data.train", source.path) for source in config.data.train]
    for entry in config.evaluation_sets():
        key = "data.heldout" if config.data.heldout and entry.data == config.data.heldout else "evaluation.sets"
        named += [(key, source.path) for source in entry.data]
    return list(dict.fromkeys(named))


def _paths(config: RunConfig) -> Iterator[ConfigProblem]:
    for key, path in paths_of(config):
        if not _in_pods(path):
            text = f"is not in the pods: they have the claim `models` at {MODELS}"
            advice = f"copy it to that claim and name it by its path there, e.g. {MODELS / path.name}"
            yield problem(key, path, text, advice)


def _fleet(config: RunConfig) -> Iterator[ConfigProblem]:
    if config.fleet.kind != "kubernetes":
        text = "the coordinator will not watch its pods: leaving ones are not drained, stuck ones not evicted"
        yield problem("fleet.kind", config.fleet.kind, text, "kubernetes", severity="warning")


def _in_pods(path: Path) -> bool:
    return any(path.is_relative_to(place) for place in (MODELS, IMAGE, CONFIG))
