"""`tandem init`: what it suggests, that its file loads and passes the check, and what it refuses before it writes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.check.memory import check_memory
from launcher.cli import app
from launcher.init import sample
from launcher.init.choices import Choices
from launcher.init.columns import answer_column, prompt_column, reward_for
from launcher.init.command import InitRequest, choose, init_command, render
from launcher.init.layout import HostMachine, suggest_layout, suggest_schedule
from tandem_config.loading import load_config
from tandem_config.problems import ConfigErrors
from tandem_config.schema import RunConfig
from tests.kit.folders import different, write_model
from weightsync.model.spec import preset

USER = {"role": "user", "content": "1+2="}
ASSISTANT = {"role": "assistant", "content": "3"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
# Its answer is compared letter by letter: no worker process has to start to read it.
SUM = {"prompt": "1+2=", "answer": "three"}
CPU = HostMachine(gpus=0, gpu_gib=None, host_gib=16)
EIGHT = HostMachine(gpus=8, gpu_gib=80, host_gib=1000)
REWARD = "def score(completion, level):\n    return float(level)\n"


def write_lines(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def asked(folder: Path, rows: Sequence[Any], *, template: str | None = None, **given: Any) -> InitRequest:
    """A request for a model and these rows in a folder; `given` replaces its parts."""
    model = given.pop("model", None) or write_model(folder / "model")
    if template is not None:
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    lines = rows if any(isinstance(row, str) for row in rows) else different(rows)
    parts: dict[str, Any] = {
        "model": model,
        "data": [str(write_lines(folder / "sums.jsonl", lines))],
        "heldout": [],
        "reward": None,
        "prompt_key": None,
        "answer_key": None,
        "out": folder / "my.yaml",
        "force": False,
        "overrides": [f"run.output_dir={folder / 'runs'}"],
    }
    return InitRequest(**parts | given)


def written(request: InitRequest, machine: HostMachine = CPU) -> RunConfig:
    """Write the file, which must pass the whole check, and load it."""
    assert init_command(request, machine) == 0
    assert request.out is not None
    return load_config(request.out)


def kinds(config: RunConfig) -> list[str]:
    return [reward.label for reward in config.reward]


def test_texts_with_numbers_run_on_a_cpu(tmp_path: Path) -> None:
    config = written(asked(tmp_path, [{"question": "1+2=", "answer": 3}] * 100))
    assert (config.data.prompt_key, config.data.answer_key, config.data.prompt_as) == ("question", "answer", "text")
    assert (kinds(config), config.run.name, config.model.dtype) == (["math_verify"], "sums", "float32")
    assert (config.grpo.prompts_per_iteration, config.grpo.group_size, config.run.iterations) == (16, 8, 20)
    assert (config.data.max_prompt_tokens, config.grpo.max_new_tokens) == (16, 16)  # of 32 positions
    assert (config.trainer.world_size, config.rollout.replicas) == (1, 1)


def test_messages_are_rendered(tmp_path: Path) -> None:
    rows = [{"messages": [USER, USER], "answer": r"\boxed{3}"}] * 4
    config = written(asked(tmp_path, rows, template=TEMPLATE))
    assert (config.data.prompt_key, kinds(config)) == ("messages", ["math_verify"])
    assert (config.grpo.prompts_per_iteration, config.grpo.updates_per_iteration) == (4, 4)
    assert "95 % of the prompts have at most 8 tokens, the longest 8" in (tmp_path / "my.yaml").read_text()


def test_texts_become_messages_if_the_tokenizer_has_a_template(tmp_path: Path) -> None:
    marked = "<|user|>" + TEMPLATE
    request = asked(tmp_path, [{"prompt": "1+2=", "answer": "three"}] * 4, template=marked)
    config = written(request)
    assert (config.data.prompt_as, kinds(config)) == ("user_message", ["exact_match"])
    rendered = asked(tmp_path, [{"prompt": "<|user|>1+2=", "answer": "3"}] * 4, template=marked, force=True)
    assert written(rendered).data.prompt_as == "text"


TOOLED = "{% if tools %}9{% endif %}" + TEMPLATE


@pytest.mark.parametrize(
    ("columns", "template", "system", "tools"),
    [
        ({"system": "3", "tools": [{"name": "f"}]}, TOOLED, "system", "tools"),
        ({"system_prompt": "3", "tools": '[{"name": "f"}]'}, TOOLED, "system_prompt", "tools"),
        ({"system": "3", "tools": [{"name": "f"}]}, TEMPLATE, "system", None),
        ({"system": None, "tools": []}, TOOLED, None, None),
        ({"system": 3, "tools": "f"}, TOOLED, None, None),
        ({"system": "3", "tools": [{"name": "f"}]}, None, None, None),
    ],
)
def test_what_only_a_template_writes_is_found(
    tmp_path: Path, columns: dict[str, Any], template: str | None, system: str | None, tools: str | None
) -> None:
    prompt = SUM["prompt"] if template is None else [USER]
    config = written(asked(tmp_path, [SUM | columns | {"prompt": prompt}] * 20, template=template))
    assert (config.data.system_key, config.data.tools_key) == (system, tools)


@pytest.mark.parametrize(
    ("template", "hint"),
    [(TOOLED, "{tools: [my_tools.py:search]}"), (TEMPLATE, "{function: my_env.py:Env}"), (None, None)],
)
def test_an_environment_is_shown_where_prompts_are_messages(
    tmp_path: Path, template: str | None, hint: str | None
) -> None:
    prompt = SUM["prompt"] if template is None else [USER]
    request = asked(tmp_path, [SUM | {"prompt": prompt}] * 20, template=template)
    assert written(request).environment is None
    text = (tmp_path / "my.yaml").read_text()
    assert (f"\n# environment: {hint}\n" in text) == ("environment:" in text) == (hint is not None)
    (tmp_path / "my.yaml").write_text(text.replace("# environment:", "environment:"))
    assert (load_config(tmp_path / "my.yaml").environment is None) == (hint is None)
    if hint is not None:
        given = asked(
            tmp_path,
            [SUM | {"prompt": prompt}] * 20,
            template=template,
            force=True,
            overrides=["environment.function=own.py:Env"],
        )
        assert "# environment" not in render(choose(given, EIGHT), tmp_path)


def test_sharegpt_is_found_and_its_system_prompt_may_be_given(tmp_path: Path) -> None:
    rows = [{"conversations": [{"from": "human", "value": "1+2="}], "answer": "three", "persona": "7"}] * 20
    config = written(asked(tmp_path, rows, template=TEMPLATE, system_key="persona"))
    assert (config.data.prompt_key, config.data.system_key) == ("conversations", "persona")


def test_an_own_reward_needs_no_answers(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARD)
    rows = [{"prompt": "1+2=", "level": 1}] * 4
    config = written(asked(tmp_path, rows, reward=f"{tmp_path / 'my_rewards.py'}:score"))
    assert (kinds(config), config.data.answer_key) == (["score"], None)
    assert "{function: 'my_rewards.py:score'}" in (tmp_path / "my.yaml").read_text()  # relative to the file


def test_columns_as_verl_has_them(tmp_path: Path) -> None:
    rows = [
        {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "three"}, "extra_info": {"question": "?"}}
    ]
    config = written(asked(tmp_path, rows * 4, template=TEMPLATE))
    assert (config.data.prompt_key, config.data.answer_key) == ("prompt", "reward_model.ground_truth")


def test_a_bfloat16_model_gets_its_limits_from_its_type(tmp_path: Path) -> None:
    rows = [SUM] * 4
    config = written(asked(tmp_path, rows, model=write_model(tmp_path / "model", torch_dtype="bfloat16")))
    assert (config.model.dtype, config.grpo.logprob_diff_limit) == ("bfloat16", None)


def test_eight_gpus_are_shared_by_trainer_and_replicas(tmp_path: Path) -> None:
    config = written(asked(tmp_path, [SUM] * 640), EIGHT)
    assert (config.trainer.tensor_parallel, config.trainer.data_parallel, config.rollout.replicas) == (1, 4, 4)
    assert (config.model.dtype, config.grpo.prompts_per_iteration, config.grpo.group_size) == ("bfloat16", 64, 16)


@pytest.mark.parametrize(
    ("model", "machine", "trainer", "rollout"),
    [
        ("qwen2.5-1.5b", HostMachine(gpus=2, gpu_gib=80, host_gib=500), (1, 1, 1), (1, 1)),
        ("qwen2.5-7b", EIGHT, (2, 1, 2), (1, 4)),
        ("qwen3-32b", HostMachine(gpus=16, gpu_gib=141, host_gib=500), (8, 1, 1), (1, 8)),
        ("qwen3-30b-a3b", HostMachine(gpus=16, gpu_gib=141, host_gib=500), (8, 1, 1), (1, 8)),
        ("qwen2.5-7b", HostMachine(gpus=4, gpu_gib=None, host_gib=500), (1, 1, 2), (1, 2)),
    ],
)
def test_sizes_fit_the_machine(
    model: str, machine: HostMachine, trainer: tuple[int, ...], rollout: tuple[int, ...]
) -> None:
    choices = Choices(load_config(None, ["model.path=m", "data.train=t.jsonl", "model.dtype=bfloat16"]), [])
    suggest_layout(choices, preset(model), machine)
    config = choices.config
    sizes = config.trainer
    assert (sizes.tensor_parallel, sizes.pipeline_parallel, sizes.data_parallel) == trainer
    assert (config.rollout.tensor_parallel, config.rollout.replicas) == rollout
    assert sizes.world_size + config.rollout.tensor_parallel * config.rollout.replicas <= machine.gpus
    if machine.gpu_gib is not None:
        assert check_memory(config, preset(model), machine.gpu_gib).problems == ()


def test_a_host_with_too_little_memory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = HostMachine(gpus=8, gpu_gib=80, host_gib=10)
    assert init_command(asked(tmp_path, [SUM] * 640), machine) == 2
    assert "4 ranks on a host take 16" in (said := " ".join(capsys.readouterr().out.split()))
    assert "of host memory, this machine has 10" in said


def test_a_model_that_fits_no_gpu_is_named() -> None:
    choices = Choices(load_config(None, ["model.path=m", "data.train=t.jsonl"]), [])
    suggest_layout(choices, preset("qwen3-235b-a22b"), EIGHT)
    assert "no sizes were found with which a replica fits" in choices.reasons["trainer.tensor_parallel"]


def test_what_the_user_gives_stays_and_decides_the_rest(tmp_path: Path) -> None:
    own = [
        "run.name=mine",
        "grpo.prompts_per_iteration=10",
        "grpo.group_size=5",
        "grpo.max_new_tokens=5",
        "reward.kind=exact_match",
        "trainer.tensor_parallel=2",
    ]
    request = asked(tmp_path, [SUM] * 640, overrides=own)
    config = written(request, EIGHT)
    assert (config.run.name, config.grpo.max_new_tokens, kinds(config)) == ("mine", 5, ["exact_match"])
    assert config.grpo.updates_per_iteration == 2  # of 50 samples, not the default's 4
    assert (config.trainer.tensor_parallel, config.trainer.data_parallel, config.rollout.replicas) == (2, 2, 4)


LONG = "grpo.max_new_tokens=4096"


@pytest.mark.parametrize(
    ("machine", "given", "kind", "reason"),
    [
        (CPU, [LONG], "sync", "share this machine"),
        (EIGHT, [], "sync", "completions of at most 16 tokens"),
        (EIGHT, ["grpo.max_new_tokens=2047"], "sync", "from 2048 on: async"),
        (EIGHT, [LONG], "async", "replicas have GPUs of their own"),
        (EIGHT, [LONG, "grpo.preset=gspo"], "sync", "but grpo.preset is given"),
        (EIGHT, [LONG, "sync.pause=drain"], "sync", "but sync.pause is given"),
        (EIGHT, [LONG, "schedule.kind=sync"], "sync", ""),
        (CPU, ["schedule.kind=async"], "async", ""),
    ],
)
def test_a_schedule_is_suggested_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: HostMachine, given: list[str], kind: str, reason: str
) -> None:
    """The whole check passes with it."""
    model = write_model(tmp_path / "model", max_position_embeddings=16384)
    request = asked(tmp_path, [SUM] * 80, model=model)
    config = written(InitRequest(**vars(request) | {"overrides": [*request.overrides, *given]}), machine)
    assert config.schedule.kind == kind
    assert config.sync.install == ("staged" if kind == "async" else "in_place")
    assert (config.grpo.preset == "decoupled") == (kind == "async")
    output = capsys.readouterr().out
    (said,) = [line for line in output.splitlines() if line.startswith(f"  schedule.kind: {kind}  (")]
    assert (reason or "as given") in said
    assert reason in " ".join((tmp_path / "my.yaml").read_text().replace("#", "").split())
    assert ("schedule async: idle trainer 0." in output) == (kind == "async")
    assert "too few to keep both sides busy" not in output


@pytest.mark.parametrize(
    ("model", "gpu_gib", "ranks", "why"),
    [
        ("qwen2.5-1.5b", None, 1, ""),
        ("qwen2.5-7b", 80, 1, "a second copy does not fit"),
        ("qwen2.5-1.5b", None, 2, "engines of several ranks get weights over NCCL"),
    ],
)
def test_async_gets_what_fits_the_machine(model: str, gpu_gib: float | None, ranks: int, why: str) -> None:
    given = ["model.path=m", "data.train=t.jsonl", "model.dtype=bfloat16", LONG, f"rollout.tensor_parallel={ranks}"]
    choices, machine = Choices(load_config(None, given), ["rollout.tensor_parallel"]), replace(EIGHT, gpu_gib=gpu_gib)
    suggest_layout(choices, preset(model), machine)
    suggest_schedule(choices, preset(model), machine)
    found = choices.written(Path("/"))
    assert (found["schedule"], found["grpo"]["preset"]) == ({"kind": "async"}, "decoupled")
    assert found.get("sync") == ({"install": "in_place"} if why else None)
    assert why in choices.reasons.get("sync.install", "")
    assert 4 * found["rollout"]["max_running_requests"] * found["rollout"]["replicas"] == 1024


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [SUM] * 19 + [SUM | {"prompt": "1" * 20}]
    config = written(asked(tmp_path, rows))
    assert (config.data.overlong_prompts, config.data.max_prompt_tokens) == ("drop", 16)
    text = (tmp_path / "my.yaml").read_text()
    assert "1 of 20 prompts exceed half of the model's 32 positions" in text
    assert "have at most 4 tokens, the longest 20" in text


def test_many_rows_are_estimated_from_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "MAX_ROWS", 10)
    config = written(asked(tmp_path, [SUM] * 20))
    assert (config.data.overlong_prompts, config.grpo.prompts_per_iteration) == ("drop", 16)
    assert "of the first 10 rows" in (tmp_path / "my.yaml").read_text()
    assert "about 20 rows" in (tmp_path / "my.yaml").read_text()  # by the bytes that were read


def test_the_file_works_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "test.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 3)
    request = asked(tmp_path / "data", [SUM] * 4, out=Path("data/my.yaml"))
    request = InitRequest(**{**vars(request), "model": Path("data/model"), "heldout": ["data/test.jsonl"]})
    config = written(request)
    assert [source.path for source in config.data.heldout or ()] == [tmp_path / "data" / "test.jsonl"]
    text = (tmp_path / "data" / "my.yaml").read_text()
    assert "  path: model\n" in text
    assert "  train: sums.jsonl\n" in text
    assert "no held-out rows" not in text


def test_a_file_is_replaced_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yaml").write_text("mine")
    rows = [SUM] * 4
    assert init_command(asked(tmp_path, rows), CPU) == 2
    assert (tmp_path / "my.yaml").read_text() == "mine"
    assert "--force to replace it" in capsys.readouterr().err
    assert init_command(asked(tmp_path, rows, force=True), CPU) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == f"wrote {tmp_path / 'my.yaml'}"
    assert output[-2:] == [f"{tmp_path / 'my.yaml'}: no problems", f"next: tandem run -c {tmp_path / 'my.yaml'}"]
    assert len(output) == 8


@pytest.mark.parametrize(
    ("rows", "given", "said"),
    [
        ([{"prompt": "1"}], {}, "the columns are prompt"),
        ([{"text": "1", "answer": "3"}], {}, "--prompt-key"),
        ([{"prompt": "1", "answer": "3"}, "{"], {}, "sums.jsonl:2"),
        ([{"prompt": "1", "answer": "3"}, {"prompt": "1"}], {}, "has no 'answer'"),
        ([{"prompt": "1", "answer": "3"}], {"prompt_key": "problem"}, "has no 'problem'"),
        ([{"prompt": [USER], "answer": "3"}], {}, "need a chat template"),
        ([{"prompt": "1", "answer": "3"}], {"data": ["gone.jsonl"]}, "gone.jsonl"),
        ([{"prompt": "1", "answer": "3"}], {"model": Path("gone")}, "no such folder"),
        ([{"prompt": "1", "answer": "3"}], {"reward": "gone.py:score"}, "gone.py"),
        ([{"prompt": "1", "answer": "3"}], {"overrides": ["grpo.groupsize=3"]}, "did you mean grpo.group_size"),
        ([{"prompt": "1", "answer": "3"}], {"out": Path("-")}, "is no name of a YAML file"),
        ([{"prompt": "1", "answer": "a long text " * 9}], {}, "no built-in reward compares such answers"),
        ([], {}, "has no rows"),
        ([SUM], {"answer_key": "null"}, "compare completions with answers"),
        ([SUM], {"overrides": ["data.chat_template={{ x"]}, "is not a valid template"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[object],
    given: dict[str, Any],
    said: str,
) -> None:
    assert init_command(asked(tmp_path, rows, **given), CPU) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.out, list(tmp_path.glob("*.yaml"))) == ("", [])


@pytest.mark.parametrize("changes", [{"model_type": "gpt2"}, {"eos_token_id": None}])
def test_a_model_that_cannot_be_trained_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    request = asked(tmp_path, [{"prompt": "1", "answer": "3"}], model=write_model(tmp_path / "model", **changes))
    assert init_command(request, CPU) == 2
    assert "supported: qwen2" in (error := capsys.readouterr().err) or "eos_token_id" in error


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": [USER], "answer": "1"}, "messages"),
        ({"problem": "x", "solution": "1", "level": "5"}, "problem"),
        ({"prompt": "x", "messages": [USER, ASSISTANT]}, "prompt"),
    ],
)
def test_the_prompt_is_found_by_its_column(row: dict[str, Any], column: str) -> None:
    assert prompt_column(row, "a.jsonl:1") == column


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x", "question": "y"}, "both prompt and question could be it"),
        ({"messages": [USER, ASSISTANT], "id": 1}, "a.jsonl:1: 'messages' ends with the assistant's message"),
        ({"text": "x", "meta": {"a": 1}}, "the columns are text, meta.a"),
    ],
)
def test_a_prompt_that_must_be_chosen_says_how(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        prompt_column(row, "a.jsonl:1")
    assert said in str(caught.value)
    assert "give --prompt-key COLUMN" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "required", "column"),
    [
        ({"answer": 3}, True, "answer"),
        ({"reward_model": {"ground_truth": "3"}}, True, "reward_model.ground_truth"),
        ({"id": 3}, False, None),
        ({"answer": ""}, False, None),
    ],
)
def test_the_answer_is_found_by_its_column(row: dict[str, Any], required: bool, column: str | None) -> None:
    assert answer_column(row, "a.jsonl:1", required=required) == column


@pytest.mark.parametrize(
    ("row", "said"),
    [({"id": 3}, "--reward FILE.py:FUNCTION"), ({"answer": "3", "solution": "1+2=3"}, "both answer and solution")],
)
def test_an_answer_that_must_be_chosen_says_how(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        answer_column(row, "a.jsonl:1", required=True)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        (["He has 4.\n#### 4", "#### 1,000"], "math_verify"),
        ([r"so \boxed{\frac{1}{2}}"], "math_verify"),
        (["12", "-3.5", "$1,200", "1/2", "20%"], "math_verify"),
        ([r"\frac{3}{4}", "$x+1$"], "math_verify"),
        (["yes", "no", "12"], "exact_match"),
        (["Paris", "Rome"], "exact_match"),
        (["A", "(B)"], "math_verify"),
        (["1e-05", "true"], "math_verify"),
        (["<answer>7 apples</answer>", "Answer: 3"], "math_verify"),
    ],
)
def test_the_reward_follows_from_the_answers(answers: list[str], kind: str) -> None:
    assert reward_for(answers)[0].label == kind


@pytest.mark.runs("tandem init")
def test_the_command_line_gives_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    request = asked(tmp_path, [{"prompt": "1+2=", "text": "1+3=", "label": "3", "level": 2}] * 4)
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_bytes(Path(request.data[0]).read_bytes())
    options = "--model model --data train.jsonl --heldout heldout.jsonl --prompt-key text --answer-key label"
    command = ["init", *options.split(), "--reward", "rewards.py:score", "--set", "run.seed=7"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    config = load_config(next(tmp_path.glob("*.yaml")))
    assert (config.data.prompt_key, config.data.answer_key, kinds(config)) == ("text", "label", ["score"])
    assert (config.run.seed, config.run.name) == (7, tmp_path.name[:40])
    assert CliRunner().invoke(app, command).exit_code == 2  # the file exists now
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0


def test_a_row_that_lacks_what_others_have_is_to_be_filled_or_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init_command(asked(tmp_path, [SUM, {"prompt": "1+2="}]), CPU) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has no 'answer', which other rows of the file have: fill it in, or remove the row" in said
    assert "answer_key" not in said


def test_copies_of_a_prompt_are_not_counted_as_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+5=", "answer": "three"} for n in range(5)] * 20
    request = asked(tmp_path, rows)
    config = written(request)
    assert config.grpo.prompts_per_iteration == 5
    assert request.out is not None
    assert "100 rows, of which 5 are different prompts" in request.out.read_text()
