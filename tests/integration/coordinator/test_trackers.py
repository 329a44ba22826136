"""TensorBoard, W&B (offline) and MLflow themselves: figures, settings and ids, over a resume that repeats some."""

import json
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.learn.evaluation import EvaluationResult
from coordinator.record.sinks import FinishedIteration
from coordinator.record.trackers import build_trackers
from coordinator.record.trackers import wandb as wandb_tracker
from coordinator.record.trackers.tensorboard import TensorboardBackend
from tandem_clients.flow import Completion, Generation, Group, GroupScores, Prompt
from tandem_config.loading import load_config
from tandem_files.metrics_file import METRICS_FILE, MetricsFile
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import EOS, encode, write_small_model
from tests.kit.waiting import until

pytestmark = pytest.mark.integration

# Row 0 is the evaluation before the training. A resume goes back to the checkpoint after iteration 2: 3 and 4 are
# trained again, with another reward.
FIRST = {0: 0.05, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
RESUMED = {3: 0.35, 4: 0.45, 5: 0.5}
KEPT_FIRST = {0: 0.05, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5}

Launches = Callable[..., list[str]]


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Runs a run in `tmp_path / "run"` twice with the given tracker; returns its warnings."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    # No login and no server of this machine's user.
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    codec = TextCodec.from_folders(write_small_model(tmp_path / "model"))

    def run(tracker: str, learning_rates: tuple[float, ...] = (1e-4, 2e-4)) -> list[str]:
        file, warnings = MetricsFile(run_dir / METRICS_FILE), []
        for rewards, learning_rate in zip((FIRST, RESUMED), learning_rates, strict=False):
            options = ["model.path=m", "data.train=d.jsonl", "run.name=mine", f"trackers=[{tracker}]"]
            config = load_config(None, [*options, f"trainer.learning_rate={learning_rate}"])
            (sink,) = build_trackers(config, run_dir, lambda: "finished", codec)
            file.cut_after(min(rewards) - 1)
            for iteration, reward in rewards.items():
                row = {"iteration": iteration, "reward_mean": reward, "eval/a/pass@8": 1.0, "heldout_accuracy": None}
                file.append(row)
                warnings.append(sink.take(FinishedIteration(record=None, row=row, evaluated=[evaluated()])))
            sink.close()
        return [warning for warning in warnings if warning]

    yield run
    import wandb

    wandb.teardown()  # its process, and the login


def evaluated() -> EvaluationResult:
    """An evaluation: four completions of a prompt, whose rewards are 0 to 3; one is long, one has marks of Markdown."""
    said = ("1", "2" * 5000, "3", "+=+")
    completions = tuple(
        Completion(token_ids=array("I", [*encode(text), EOS]), logprobs=array("f"), truncated=False, oldest_version=0)
        for text in said
    )
    group = Group(
        group_id="eval.a.row1",
        prompt=Prompt(row=1, token_ids=array("I", encode("1+2=")), answer="3"),
        completions=completions,
    )
    rewards_PG = np.array([[0.0, 1.0, 2.0, 3.0]])
    parts = {"exact_match": rewards_PG, "some": np.array([[1.0, np.nan, 0.5, 0.0]])}
    scored = GroupScores(
        rewards_PG=rewards_PG, accuracy=0.5, parts=parts, missing_PG=np.array([[True, False, False, False]])
    )
    return EvaluationResult(
        name="a", policy_version=0, generation=Generation(groups=(group,), engine_s=0.0, retried_calls=0), scored=scored
    )


def test_tensorboard_shows_completions_if_it_is_asked_to(tmp_path: Path, launches: Launches) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert launches("{kind: tensorboard, completions: 3}", (1e-4,)) == []
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in found.Tensors("completions")] == list(FIRST)
    texts = [text.decode() for text in found.Tensors("completions")[-1].tensor_proto.string_val]
    assert texts[0].startswith("**eval.a.row1#0** (a): no reward; exact_match 0, some 1\n\nprompt:\n\n    1+2=")
    assert texts[2].startswith("**eval.a.row1#3** (a): reward 3;")
    assert "    +=+<eos>" in texts[2]


def test_mlflow_keeps_completions_as_artifacts(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlflow"
    assert launches(f"{{kind: mlflow, uri: '{uri}', completions: 100}}", (1e-4,)) == []
    (path,) = tmp_path.glob("mlflow/**/completions/00000004.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    assert [(row["sample"], row["reward"]) for row in rows] == [
        *(("eval.a.row1#0", None), ("eval.a.row1#1", 1.0), ("eval.a.row1#2", 2.0), ("eval.a.row1#3", 3.0))
    ]
    assert (rows[1]["scores"], len(rows[1]["completion"])) == ("exact_match 1", 3999)
    assert (rows[0]["kind"], rows[0]["prompt"], rows[0]["answer"]) == ("a", "1+2=", "3")


def test_wandb_gets_a_table_of_completions_with_the_figures_of_the_step(tmp_path: Path, launches: Launches) -> None:
    assert launches("{kind: wandb, mode: offline, completions: 2}", (1e-4,)) == []
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    until(lambda: len([*folder.glob("files/media/table/completions_*.json")]) == len(FIRST), what="all tables")
    (path,) = folder.glob("files/media/table/completions_4_*.json")
    assert [row[0] for row in json.loads(path.read_text())["data"]] == ["eval.a.row1#0", "eval.a.row1#3"]
    (log,) = folder.glob("*.wandb")
    until(lambda: wandb_records(log)[1] == FIRST, what="all figures")


def test_a_tracker_that_takes_no_completions_gets_the_figures(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, iteration: int, completions: object) -> None:
        raise PermissionError("no artifacts")

    monkeypatch.setattr(TensorboardBackend, "show", refuse)
    (warning,) = launches("{kind: tensorboard, completions: 3}", (1e-4,))
    assert warning == ("tensorboard does not take completions: PermissionError: no artifacts; it gets the figures only")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert len(found.Scalars("reward_mean")) == len(FIRST)


def test_tensorboard_shows_the_repeated_iterations_as_they_were_trained_last(
    tmp_path: Path, launches: Launches
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert launches("tensorboard") == []
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["eval/a/pass@8", "reward_mean"]
    rewards = {event.step: event.value for event in found.Scalars("reward_mean")}
    assert rewards == pytest.approx({0: 0.05, 1: 0.1, 2: 0.2, **RESUMED})
    assert len(found.Scalars("reward_mean")) == 6
    assert "_hparams_/session_start_info" in found.Tags()["tensors"]


def test_mlflow_continues_its_run(tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlflow"
    assert launches(f"{{kind: mlflow, uri: '{uri}', experiment: sums}}") == []
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward_mean")
    assert [(metric.step, metric.value) for metric in history] == list(KEPT_FIRST.items())
    assert run.data.metrics["eval/a/pass_at_8"] == 1.0
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["trainer.learning_rate"] == "0.0001"
    assert run.data.tags["resumed.trainer.learning_rate"] == "0.0002"


def test_wandb_offline_writes_two_parts_of_one_run(tmp_path: Path, launches: Launches) -> None:
    assert launches("{kind: wandb, project: sums, group: g, tags: [a], mode: offline}") == []
    one, two = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    # W&B's own process writes the last records.
    until(lambda: wandb_records(one)[1] == FIRST and wandb_records(two)[1] == {5: 0.5}, what="all figures")
    runs = [wandb_records(path)[0] for path in (one, two)]
    assert {(run["project"], run["group"], run["name"]) for run in runs} == {("sums", "g", "mine")}
    assert runs[0]["id"] == runs[1]["id"]


@pytest.mark.parametrize("key", ["", "a" * 40])
def test_without_login_or_network_wandb_keeps_the_run_on_disk(
    key: str, tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setattr(wandb_tracker, "INIT_TIMEOUT_S", 2.0)
    (warning,) = launches("{kind: wandb, mode: online}", (1e-4,))
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert f"upload it with `wandb sync {path.parent}`" in warning
    assert ("CommError" if key else "No API key configured") in warning
    until(lambda: wandb_records(path)[1] == FIRST, what="all figures")


def test_a_library_that_is_missing_is_named(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (warning,) = launches("tensorboard", (1e-4,))
    assert "pip install 'tandem[trackers]'" in warning


def test_the_trackers_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, wandb, mlflow, mlflow.entities, tensorboard.summary.writer.event_file_writer; "
        "from tensorboard.plugins.hparams import summary_v2; print({'torch', 'tensorflow'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "set()"


def wandb_records(path: Path) -> tuple[dict[str, str], dict[int, float]]:
    """Reads a file of W&B: the run, and the reward by step."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, rewards, run = path.read_bytes(), {}, {}
    # A header of 7 bytes; then, in a file of one block, records behind their checksum (4), length (2) and kind (1).
    assert len(content) < 32768
    place = 7
    while place + 7 <= len(content):
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        record = Record.FromString(content[place + 7 : place + 7 + length])
        place += 7 + length
        if record.HasField("run"):
            run = {"project": record.run.project, "group": record.run.run_group}
            run |= {"name": record.run.display_name, "id": record.run.run_id}
        if record.HasField("history"):
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rewards[record.history.step.num] = values["reward_mean"]
    return run, rewards
