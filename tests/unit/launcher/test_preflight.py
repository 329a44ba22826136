"""Every bad input is named before anything is started: files, model, tokenizer, data, limits, host."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.normalizers import Strip

from launcher.check.host import check_host
from launcher.check.preflight import preflight
from servicekit.cuda import Gpus
from tandem_config.loading import draft_config, load_config
from tandem_config.problems import ConfigProblem
from tests.kit.folders import (
    CONFIG,
    WORDS,
    tensors,
    write_config,
    write_data,
    write_model,
    write_rows,
    write_sharded,
    write_tokenizer,
)


def check(file: Path, *overrides: str, redis_url: str | None = None) -> list[ConfigProblem]:
    return preflight(draft_config(file, list(overrides)), redis_url=redis_url)


def only(file: Path, *overrides: str) -> ConfigProblem:
    """The one problem that there should be (cores of the machine apart)."""
    (problem,) = [found for found in check(file, *overrides) if "cores" not in found.message]
    return problem


def test_a_good_configuration_has_no_problems(tmp_path: Path) -> None:
    assert check(write_config(tmp_path)) == []


STAGED = ("sync.install=staged", "rollout.tensor_parallel=2")


@pytest.mark.parametrize(
    ("gpus", "settings", "severity"),
    [
        (8, STAGED, "error"),
        (8, (*STAGED, "sync.transport=collective"), "error"),
        (8, (*STAGED, "sync.allow_staged_nccl=true"), None),
        (8, (*STAGED, "sync.transport=colocated"), None),
        (8, STAGED[1:], None),
        (8, STAGED[:1], None),
        (0, STAGED, None),
        (0, (*STAGED, "fleet.kind=kubernetes"), "warning"),
    ],
)
def test_staged_beside_an_engines_collectives_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, settings: tuple[str, ...], severity: str | None
) -> None:
    ids = tuple(str(gpu) for gpu in range(gpus))
    monkeypatch.setattr("launcher.check.host.find_gpus", lambda: Gpus(usable=ids, present=gpus))
    found = [each for each in check(write_config(tmp_path), *settings) if each.key == "sync.install"]
    assert [each.severity for each in found] == ([] if severity is None else [severity])
    for each in found:
        assert "NCCL" in each.message
        assert "sync.allow_staged_nccl: true" in each.suggestion


@pytest.mark.parametrize("trainer_ranks", [None, 0])
def test_an_evaluation_counts_no_trainer(monkeypatch: pytest.MonkeyPatch, trainer_ranks: int | None) -> None:
    config = load_config(None, ["model.path=m", "data.train=t.jsonl", "trainer.data_parallel=4", "rollout.replicas=1"])
    monkeypatch.setattr("launcher.check.host.find_gpus", lambda: Gpus(present=1))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    said = " ".join(each.message for each in check_host(config, None, trainer_ranks=trainer_ranks))
    assert f"the run needs {1 if trainer_ranks == 0 else 5}, one per" in said
    assert ("4 trainer processes on 1 cores" in said) == (trainer_ranks is None)


def test_a_sharded_model_is_as_good(tmp_path: Path) -> None:
    write_sharded(tmp_path / "model")
    assert check(write_config(tmp_path)) == []


def truncate(path: Path, by: int = 100) -> None:
    os.truncate(path, path.stat().st_size - by)


def resave(folder: Path, **changes: Any) -> None:
    """Save the weights with some tensors replaced, or removed where the new one is None."""
    everything = {**tensors(CONFIG), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in everything.items() if value is not None}, folder / "model.safetensors")


def flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] = 0x58
    path.write_bytes(bytes(content))


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new), encoding="utf-8")


INDEX = "model.safetensors.index.json"
BAD_MODELS: list[tuple[str, Callable[[Path], object], str, str]] = [
    ("no config.json", lambda m: (m / "config.json").unlink(), "config.json does not exist", "save_pretrained"),
    ("config.json is no JSON", lambda m: (m / "config.json").write_text("{"), "is not valid JSON", "save_pretrained"),
    ("config.json is a list", lambda m: (m / "config.json").write_text("[]"), "holds a list, not a table", "save"),
    ("unsupported architecture", lambda m: write_model(m, model_type="gpt2"), "'gpt2' is not supported", "Qwen3"),
    ("size missing", lambda m: write_model(m, hidden_size=None), "has no 'hidden_size'", ""),
    ("size is text", lambda m: write_model(m, hidden_size="big"), "hidden_size is 'big'", ""),
    ("no weights", lambda m: (m / "model.safetensors").unlink(), "has no *.safetensors file", "an index names"),
    ("truncated weights", lambda m: truncate(m / "model.safetensors"), "is truncated", "copy the file again"),
    ("empty weights", lambda m: (m / "model.safetensors").write_bytes(b""), "not a safetensors file", "again"),
    ("truncated header", lambda m: os.truncate(m / "model.safetensors", 50), "is truncated: the header", "again"),
    ("corrupt header", lambda m: flip_header(m / "model.safetensors"), "its header is not JSON", "again"),
    ("trailing bytes", lambda m: (m / "model.safetensors").open("ab").write(b"xx"), "2 bytes more", "again"),
    ("missing tensor", lambda m: resave(m, model__norm__weight=None), "tensor model.norm.weight not in any", "belong"),
    ("mis-shaped tensor", lambda m: write_model(m, intermediate_size=24), "[12, 16], config.json implies [24, 16]", ""),
    ("missing shard", lambda m: (write_sharded(m) / "model-2.safetensors").unlink(), "is missing; ", "download"),
    ("bad index", lambda m: (write_sharded(m) / INDEX).write_text("{}"), "not a valid index", ""),
    ("index leads outside", lambda m: rewrite(write_sharded(m) / INDEX, "model-1", "../m"), "outside", ""),
    ("another output layer", lambda m: resave(m, lm_head__weight=np.ones((16, 16), np.float32)), "lm_head", "false"),
    ("gelu", lambda m: write_model(m, hidden_act="gelu"), "hidden_act 'gelu' is not supported", "SwiGLU"),
    ("LongRoPE", lambda m: write_model(m, rope_scaling={"type": "longrope"}), "'longrope'", "remove the entry"),
    ("dynamic scaling", lambda m: write_model(m, rope_scaling={"type": "dynamic", "factor": 4.0}),
     "the frequencies of 128 tokens", "no sequence is longer than 32"),
    ("GPTQ", lambda m: write_model(m, quantization_config={"quant_method": "gptq"}), "quantized (gptq)", "unquantized"),
    ("sliding", lambda m: write_model(m, use_sliding_window=True, sliding_window=4, max_window_layers=0),
     "use_sliding_window: true", "full attention"),
    ("no tokenizer", lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json does not exist", "save_pretrained"),
    ("corrupt tokenizer", lambda m: (m / "tokenizer.json").write_text("{}"), "is not a tokenizer", ""),
    ("tokenizer too large", lambda m: write_tokenizer(m, [str(n) for n in range(40)]), "id 39", "trained with"),
    ("no end-of-sequence id", lambda m: write_model(m, eos_token_id=None), "eos_token_id", "grpo.max_new_tokens"),
    ("end outside the vocabulary", lambda m: write_model(m, eos_token_id=99), "99 is not in the vocabulary of 16", ""),
]  # fmt: skip


def test_data_of_evaluation_sets_is_checked(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.jsonl", write_data(tmp_path / "good.jsonl", [(9, 9)])
    bad.write_text('{"prompt": "1+1="}\n')
    sets = [{"name": "bad", "data": "bad.jsonl"}, {"name": "long", "data": str(good), "max_new_tokens": 30}]
    problems = check(write_config(tmp_path, evaluation={"sets": sets}))
    assert [(problem.key, problem.value) for problem in problems] == [
        ("evaluation.sets", f"{bad}:1"),
        ("evaluation.sets", "long"),
    ]
    assert "30 new tokens exceed the model's max_position_embeddings (32 tokens)" in problems[1].message


def test_a_rotary_scaling_makes_room_for_longer_completions(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    write_model(tmp_path / "model", rope_scaling={"type": "yarn", "factor": 4.0})
    limits = [problem for new in (120, 130) for problem in check(file, f"grpo.max_new_tokens={new}")
              if "longest sequence" in problem.message]  # fmt: skip
    assert [(each.value, "yarn rotary scaling (128 tokens)" in each.message) for each in limits] == [("130", True)]


def test_a_stop_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    problem = only(write_config(tmp_path, grpo={"stop_token_ids": [3, 16]}))
    assert (problem.key, problem.value) == ("grpo.stop_token_ids", "16")
    assert "vocabulary of 16" in problem.message


@pytest.mark.parametrize(
    ("spoil", "message", "suggestion"), [row[1:] for row in BAD_MODELS], ids=[row[0] for row in BAD_MODELS]
)
def test_a_bad_model_folder_is_named(
    tmp_path: Path, spoil: Callable[[Path], object], message: str, suggestion: str
) -> None:
    file = write_config(tmp_path)
    spoil(tmp_path / "model")
    problem = only(file)
    assert problem.key == "model.path"
    assert str(tmp_path / "model") in problem.value
    assert message in problem.message
    assert suggestion in problem.suggestion


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({"mlp_only_layers": [1]}, "1"), ({"decoder_sparse_step": 2}, "0, 2"), ({"mlp_only_layers": []}, None)],
)
def test_a_mixture_with_dense_layers_is_refused_since_rollouts_cannot_hold_it(
    tmp_path: Path, changes: dict[str, Any], layers: str | None
) -> None:
    file = write_config(tmp_path)
    write_model(tmp_path / "model", **EXPERTS, **changes)
    found = [problem.message for problem in check(file) if "mlp_only_layers" in problem.message]
    assert len(found) == (layers is not None)
    assert all(f"leave layers {layers} without experts" in message for message in found)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"num_experts": 6, "moe_intermediate_size": 14, "intermediate_size": 45}, "4,2", None),
        ({"num_experts": 3, "moe_intermediate_size": 14}, "2,2", "does not divide the model's number of experts (3)"),
        ({"num_experts": 4, "moe_intermediate_size": 7}, "4,2", "leaves 2 ranks to each expert, which do not divide"),
        ({"model_type": "qwen3"}, "2,2", "the model has no experts to divide"),
    ],
)
def test_experts_that_a_replica_cannot_divide_are_named(
    sizes: dict[str, Any], options: str, message: str | None, tmp_path: Path
) -> None:
    file = write_config(tmp_path)
    write_model(tmp_path / "model", **EXPERTS | {"norm_topk_prob": True} | sizes)
    tensor, expert = options.split(",")
    found = check(file, f"rollout.tensor_parallel={tensor}", f"rollout.expert_parallel={expert}")
    errors = [each for each in found if each.key.startswith("rollout") and each.severity == "error"]
    assert [problem.key for problem in errors] == ([] if message is None else ["rollout.expert_parallel"])
    assert all(message in problem.message for problem in errors if message is not None)


def test_a_tied_model_may_have_a_copy_of_its_embedding(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    resave(tmp_path / "model", lm_head__weight=np.zeros((16, 16), np.float32))
    assert check(file) == []


def test_a_missing_model_folder_lists_models_beside_it(tmp_path: Path) -> None:
    problem = only(write_config(tmp_path), f"model.path={tmp_path / 'modle'}")
    assert (problem.key, problem.message) == ("model.path", "no such folder")
    assert problem.suggestion == "model folders beside it: model"


def test_a_hub_name_is_not_downloaded(tmp_path: Path) -> None:
    assert "hf download Qwen/Qwen3-0.6B" in only(write_config(tmp_path), "model.path=Qwen/Qwen3-0.6B").suggestion


BAD_SIZES = [
    ("trainer.tensor_parallel=3", "trainer.tensor_parallel", ["attention heads (4)", "KV heads (2)"], "1, 2, 4"),
    ("trainer.tensor_parallel=8", "trainer.tensor_parallel", ["attention heads (4)", "FFN size (12)"], "1, 2, 4"),
    ("rollout.tensor_parallel=3", "rollout.tensor_parallel", ["attention heads (4)", "KV heads (2)"], "1, 2, 4"),
    ("rollout.tensor_parallel=8", "rollout.tensor_parallel", ["attention heads (4)", "FFN size (12)"], "1, 2, 4"),
    ("trainer.pipeline_parallel=2", "trainer.pipeline_parallel", ["layers (3)"], "1, 3"),
]


@pytest.mark.parametrize(("option", "key", "totals", "fits"), BAD_SIZES, ids=[row[0] for row in BAD_SIZES])
def test_a_parallel_size_that_does_not_divide_is_named(
    tmp_path: Path, option: str, key: str, totals: list[str], fits: str
) -> None:
    found = [problem for problem in check(write_config(tmp_path), option) if problem.severity == "error"]
    assert [problem.key for problem in found] == [key] * len(totals)
    assert [problem.message for problem in found] == [f"does not divide the model's {total}" for total in totals]
    assert {problem.suggestion for problem in found} == {f"sizes that fit this model: {fits}"}
    assert found[0].where == f"--set {option}"


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_ranks_may_share_kv_heads(side: str, tmp_path: Path) -> None:
    assert not [p for p in check(write_config(tmp_path), f"{side}.tensor_parallel=4") if p.severity == "error"]


GOOD_ROW = json.dumps({"prompt": "1+2=", "answer": "3"}) + "\n"
BAD_DATA = [
    ("no prompt", GOOD_ROW + '{"answer": "3"}\n', ":2", "has no 'prompt'"),
    ("no answer", GOOD_ROW + '{"prompt": "1", "anser": "3"}\n', ":2", "have (did you mean its 'anser'?): fill it"),
    ("object for text", '{"prompt": "1", "answer": {}}\n', ":1", "must be a string or a number"),
    ("empty prompt", '{"prompt": "", "answer": "3"}\n', ":1", "is empty"),
    ("broken JSON", GOOD_ROW * 2 + "{\n", ":3", "is not valid JSON"),
    ("empty file", "", "train.jsonl", "has no rows"),
]


@pytest.mark.parametrize(
    ("content", "place", "message"), [row[1:] for row in BAD_DATA], ids=[row[0] for row in BAD_DATA]
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, content: str, place: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text(content, encoding="utf-8")
    problem = next(found for found in check(write_config(tmp_path)) if found.severity == "error")
    assert problem.key == "data.train"
    assert problem.value.endswith(place)
    assert message in problem.message


def test_invalid_utf8_is_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(GOOD_ROW.encode() + b'{"prompt": "\xff", "answer": "1"}\n')
    problem = next(found for found in check(write_config(tmp_path)) if found.severity == "error")
    assert problem.value.endswith(":2")
    assert "not valid UTF-8" in problem.message


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    problem = only(write_config(tmp_path), f"data.heldout={tmp_path / 'gone.jsonl'}")
    assert (problem.key, problem.value, problem.message) == (
        "data.heldout",
        str(tmp_path / "gone.jsonl"),
        "does not exist",
    )


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n" * 50, encoding="utf-8")
    (found,) = [problem for problem in check(write_config(tmp_path)) if problem.severity == "error"]
    assert found.value.endswith("train.jsonl:1")
    assert found.message.endswith("(and 49 more rows with the same fault: 2, 3, 4, 5, 6, ...)")


def test_long_prompts_are_an_error_or_are_left_out_by_policy(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 8)
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"prompt": "11111111+2=", "answer": "3"}\n')
    config = write_config(tmp_path, data={"max_prompt_tokens": 6})
    stops = only(config)
    assert (stops.key, stops.severity) == ("data.train", "error")
    assert stops.value.endswith("train.jsonl:9")
    assert stops.message == "1 of 9 prompts exceed data.max_prompt_tokens (6); the first has 11 tokens"
    assert stops.suggestion == "raise data.max_prompt_tokens to 11, or set data.overlong_prompts: drop"
    dropped = only(config, "data.overlong_prompts=drop")
    assert dropped.severity == "warning"
    assert dropped.message.endswith("they are left out")
    # The policy is set already and would leave nothing.
    everything = next(each for each in check(config, "data.overlong_prompts=drop", "data.max_prompt_tokens=3"))
    assert everything.suggestion == "raise data.max_prompt_tokens to 11: no prompt is left otherwise"


def test_a_prompt_without_tokens_is_named(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer.normalizer = Strip()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "train.jsonl").write_text(GOOD_ROW * 4 + '{"prompt": " ", "answer": "3"}\n', encoding="utf-8")
    problem = only(file)
    assert problem.value.endswith("train.jsonl:5")
    assert "makes no token of this prompt" in problem.message


def test_a_tokenizer_that_fails_on_a_prompt_is_named(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    tokenizer = tmp_path / "model" / "tokenizer.json"
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    content["model"]["unk_token"] = "<none>"
    tokenizer.write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "train.jsonl").write_text('{"prompt": "?", "answer": "3"}\n' * 4, encoding="utf-8")
    problem = only(file)
    assert problem.key == "data.train"
    assert "the tokenizer fails on a prompt" in problem.message


def test_no_prompt_left_is_an_error_even_with_drop(tmp_path: Path) -> None:
    problem = only(write_config(tmp_path), "data.overlong_prompts=drop", "data.max_prompt_tokens=3")
    assert problem.severity == "error"


BAD_LIMITS = [
    ("grpo.max_new_tokens=30", "grpo.max_new_tokens", "the model's max_position_embeddings (32 tokens)", "at most 28"),
    ("rollout.context_length=6", "rollout.context_length", "rollout.context_length (6 tokens)", "at most 2"),
    ("rollout.max_total_tokens=7", "rollout.max_total_tokens", "the KV cache (7 tokens)", "at most 3"),
    (
        "trainer.max_tokens_per_micro_batch=7",
        "trainer.max_tokens_per_micro_batch",
        "the longest prompt (4 tokens) and grpo.max_new_tokens (4) exceed a micro-batch (7 tokens)",
        "raise it to at least 8",
    ),
]


@pytest.mark.parametrize(("option", "key", "message", "suggestion"), BAD_LIMITS, ids=[row[0] for row in BAD_LIMITS])
def test_prompt_and_completion_must_fit(tmp_path: Path, option: str, key: str, message: str, suggestion: str) -> None:
    problem = only(write_config(tmp_path), option)
    assert problem.key == key
    assert message in problem.message
    assert suggestion in problem.suggestion


def test_few_rows_are_a_warning(tmp_path: Path) -> None:
    problem = only(write_config(tmp_path), "grpo.prompts_per_iteration=16")
    assert (problem.key, problem.severity, problem.suggestion) == (
        "grpo.prompts_per_iteration",
        "warning",
        "8 or fewer",
    )


def test_more_ranks_than_cores_is_a_warning(tmp_path: Path) -> None:
    replicas = len(os.sched_getaffinity(0)) + 1
    (problem,) = check(write_config(tmp_path), f"rollout.replicas={replicas}")
    assert problem.severity == "warning"
    assert f"{replicas} rollout processes" in problem.message


def test_configuration_and_files_are_judged_together(tmp_path: Path) -> None:
    file = write_config(tmp_path, grpo={"grop_size": 3})
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "train.jsonl").write_text("{}\n", encoding="utf-8")
    found = [problem.key for problem in check(file, "oops", "trainer.tensor_parallel=3") if problem.severity == "error"]
    assert found[:2] == ["oops", "grpo.grop_size"]
    assert found[2:] == ["trainer.tensor_parallel", "trainer.tensor_parallel", "model.path", "data.train"]


def test_an_output_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = only(write_config(tmp_path), f"run.output_dir={tmp_path / 'file' / 'runs'}")
    assert (problem.key, problem.message) == ("run.output_dir", f"{tmp_path / 'file'} is a file")


def test_folders_that_cannot_be_written_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = only(write_config(tmp_path), "run.output_dir=/proc/runs")
    assert (problem.key, problem.message) == ("run.output_dir", "/proc is not writable")
    monkeypatch.setenv("HOME", "/proc/1")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    problem = only(write_config(tmp_path))
    assert (problem.key, problem.value) == ("HOME", "/proc/1")
    assert "the engines keep caches there" in problem.message


def test_an_unreachable_redis_is_named_without_its_password(tmp_path: Path) -> None:
    (problem,) = check(write_config(tmp_path), redis_url=f"unix://:secret@{tmp_path}/no.sock")
    assert problem.key == "REDIS_URL"
    assert "is unreachable" in problem.message
    assert "secret" not in str(problem)


def test_a_redis_that_refuses_the_password_is_named(tmp_path: Path, redis_process: Callable[..., Any]) -> None:
    server = redis_process(password="right")
    (problem,) = check(write_config(tmp_path), redis_url=server.url_without_password)
    assert problem.key == "REDIS_URL"
    assert "wants a password" in problem.message
    assert check(write_config(tmp_path), redis_url=server.url) == []


def with_answers(tmp_path: Path, answers: list[str]) -> list[ConfigProblem]:
    rows = [json.dumps({"prompt": "12+34=", "answer": answer}) for answer in answers]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return check(write_config(tmp_path), "reward.kind=math_verify", "reward.workers=1", "data.heldout=null")


def test_answers_that_math_verify_cannot_read_are_named(tmp_path: Path) -> None:
    good = [r"3\sqrt{13}", "(-2, 7]", "so 9.\n#### 1,234", r"\boxed{4}"] * 20
    found = [
        each
        for each in with_answers(tmp_path, [*good, " ", "18 dollars", "18 dollars", "x ####"])
        if "answer" in each.message
    ]
    assert [(each.severity, each.value.rpartition(":")[2]) for each in found] == [("warning", "81"), ("warning", "82")]
    empty, doubtful = (each.message for each in found)
    assert empty == "the answer ' ' is empty: no completion can earn the reward; 2 rows in all, also 84"
    assert doubtful.startswith("the answer '18 dollars' holds the word 'dollars'")
    assert "2 rows in all, also 83" in doubtful


def test_a_column_without_any_answer_is_refused(tmp_path: Path) -> None:
    (found,) = [each for each in with_answers(tmp_path, ["", "  "] * 40) if "answer" in each.message]
    assert (found.severity, found.suggestion) == ("error", "correct data.answer_key or the rows")


OWN = ["reward.function=mine.py:score"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def score(completion): return 1", ""),
        ("def scor(completion): return 1", "mine.py has no score; did you mean scor?"),
        ("import missing_library", "No module named 'missing_library' (mine.py:1)"),
        ("def score(completion, level): return 1", "takes 'level', which nothing fills"),
        ("def score(completions, prompt): return 1", "takes 'completions', lists of a batch, and 'prompt'"),
    ],
)
def test_an_own_reward_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    found = check(write_config(tmp_path), *OWN)
    assert [(problem.key, problem.where) for problem in found] == (
        [("reward.function", "--set reward.function=mine.py:score")] if message else []
    )
    assert all(message in problem.message for problem in found)


def test_an_own_reward_that_is_missing_is_named_beside_all_else(tmp_path: Path) -> None:
    file = write_config(tmp_path, model={"path": "missing"})
    with file.open("a", encoding="utf-8") as text:
        text.write("reward: [{kind: regx}, {function: 'mine.py:score'}, {function: 'mine.py:score', pattern: a}]")
    problems = {problem.key: problem for problem in check(file)}
    assert {"model.path", "reward[0].kind", "reward[2].pattern", "reward[1].function"} <= set(problems)
    assert "reward[2].function" not in problems
    assert problems["reward[1].function"].message == f"{tmp_path}/mine.py does not exist"


@pytest.mark.parametrize(("value", "named"), [(None, True), (" ", True), ("sk-1", False)])
def test_a_judge_without_its_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, named: bool
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    judge = "{kind: judge, url: 'http://h/v1', model: m, prompt: '{{ completion }}', api_key_env: JUDGE_KEY}"
    found = check(write_config(tmp_path), f"reward=[{{}}, {judge}]")
    assert [(problem.key, problem.value) for problem in found] == [("reward[1].api_key_env", "JUDGE_KEY")] * named
    assert all("the key of http://h/v1, is not set or empty" in problem.message for problem in found)


TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def add_template(folder: Path, where: str) -> None:
    if where == "chat_template.jinja":
        (folder / where).write_text(TEMPLATE, encoding="utf-8")
    else:
        template = TEMPLATE if where == "tokenizer_config.json" else [{"name": "default", "template": TEMPLATE}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "list of templates"])
def test_a_chat_template_that_no_prompt_was_rendered_with_is_said(tmp_path: Path, where: str) -> None:
    file = write_config(tmp_path)
    add_template(tmp_path / "model", where)
    (found,) = [problem for problem in check(file) if "template" in problem.message]
    assert (found.key, found.severity) == ("data.train", "warning")
    assert f"{tmp_path / 'model'} has a chat template, and prompts that are texts are used without it" in found.message
    assert "8 of 8 hold none of its <|im_end|>, <|im_start|>" in found.message
    assert "data.prompt_as: user_message" in found.suggestion
    assert [problem for problem in check(file, "data.chat_template=none") if "template" in problem.message] == []


def test_rendered_prompts_are_not_complained_about(tmp_path: Path) -> None:
    file = write_config(tmp_path, data={"heldout": None})
    add_template(tmp_path / "model", "chat_template.jinja")
    write_tokenizer(tmp_path / "model", [*WORDS[:2], "<|im_start|>", "<|im_end|>", *"0123456789", "+", "="])
    write_rows(tmp_path / "train.jsonl", prompt="<|im_start|>1+2=<|im_end|>")
    assert [problem for problem in check(file) if "template" in problem.message] == []
