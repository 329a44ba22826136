"""Suggests what a run needs besides the model and the data: columns, reward, lengths, batch, type."""

import json
import math
from collections.abc import Mapping

from coordinator.data.sources import find_sources
from launcher.check.data.columns import SYSTEMS, TOOLS
from launcher.check.data.template import PlainPrompts
from launcher.init.choices import Choices
from launcher.init.columns import answer_column, prompt_column, reward_for, templated_column
from launcher.init.layout import HostMachine, suggest_layout, suggest_schedule
from launcher.init.sample import RowSample, first_row, read_sample
from tandem_clients.flow import DataKey
from tandem_clients.formatting import PromptText, prompt_format
from tandem_config import keys
from tandem_config.problems import ConfigErrors, ConfigProblem, problem
from tandem_config.sections.reward import ExactMatchReward
from tandem_files.rows.messages import prompt_of
from tandem_files.rows.problems import DataError, RowProblem
from tandem_files.rows.reading import read_rows
from tandem_files.tokenizer import TextCodec
from weightsync.model.spec import ModelSpec

# With a step, so that a longer row that is added later fits.
_STEP = 16
# Tokens of the longest completion; on CPUs a token takes a thousand times as long as on GPUs.
_GPU_TOKENS, _CPU_TOKENS = 1024, 256
_FEWEST_ITERATIONS, _MOST_ITERATIONS = 20, 200


def suggest_all(choices: Choices, spec: ModelSpec, codec: TextCodec, machine: HostMachine) -> None:
    """Suggest every key, in the order in which they depend on each other.

    Raises: ConfigErrors: a column or a reward must be chosen; ValueError: rows (DataError) or the chat template cannot
        be used; OSError.
    """
    _suggest_dtype(choices, machine)
    _suggest_columns(choices, codec)
    formats = prompt_format(choices.config.data, codec)
    parts: tuple[DataKey, ...] = ("train",) if choices.config.data.heldout is None else ("train", "heldout")
    samples = {part: read_sample(choices.config.data, part, formats) for part in parts}
    train = samples["train"]
    if choices.config.data.heldout is None:
        choices.remark("data.train", "no held-out rows were given, so no accuracy is measured: add heldout: FILE here")
    if "reward" not in choices.given:
        if choices.config.data.answer_key is None:
            raise ConfigErrors([_without_answers()])
        reward, why = reward_for(train.answers)
        choices.suggest("reward", (reward,), why)
    _suggest_batch(choices, train, machine)
    _suggest_prompt_tokens(choices, spec, list(samples.values()))
    _suggest_new_tokens(choices, spec, codec, train, machine)
    suggest_layout(choices, spec, machine)
    suggest_schedule(choices, spec, machine)
    choices.suggest("trainer.learning_rate", choices.config.trainer.learning_rate, "usual for RL on a trained model")


def _without_answers() -> ConfigProblem:
    return problem(
        "--answer-key",
        "null",
        "built-in rewards that are suggested compare completions with answers",
        "give --reward FILE.py:FUNCTION, or --set reward.kind=... (docs/rewards.md)",
    )


def _reason(key: str) -> str:
    return keys.note(key, "why")


def _suggest_dtype(choices: Choices, machine: HostMachine) -> None:
    file = choices.config.model.path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = "bfloat16" if machine.has_gpus or stored in ("bfloat16", "float16") else "float32"
    also = "" if dtype == stored or not machine.has_gpus else "; GPUs compute bfloat16"
    choices.suggest("model.dtype", dtype, f"config.json says {stored}{also}")


def _suggest_columns(choices: Choices, codec: TextCodec) -> None:
    """Suggest the columns of prompt and answer, and how texts are used, by the first row."""
    place, record = first_row(choices.config.data, "train")
    if "data.prompt_key" not in choices.given:
        prompt = prompt_column(record, place)
        kind = "texts" if isinstance(prompt_of(record, prompt), str) else "messages"
        choices.suggest("data.prompt_key", prompt, f"{kind}, as in {place}")
    if "data.answer_key" not in choices.given:
        answer = answer_column(record, place, required="reward" not in choices.given)
        why = "handed to the reward" if "reward" in choices.given else "compared with completions"
        choices.suggest("data.answer_key", answer, why if answer is not None else "no column has answers")
    if _needs_template(choices, codec):
        why = "the tokenizer has a chat template; for a base model set prompt_as: text and chat_template: none"
        choices.suggest("data.prompt_as", "user_message", why)
    _suggest_templated(choices, codec, place, record)


def _suggest_templated(choices: Choices, codec: TextCodec, place: str, record: Mapping[str, object]) -> None:
    """Suggest the columns that only a chat template writes: of a system prompt, and of tools."""
    data = choices.config.data
    templates = prompt_format(data, codec).templates.values()
    prompt = prompt_of(record, data.prompt_key)
    if not templates or (isinstance(prompt, str) and data.prompt_as == "text"):
        return
    takes_tools = any(template.takes_tools for template in templates)
    if choices.config.environment is None:
        which = "tools: [my_tools.py:search]" if takes_tools else "function: my_env.py:Env"
        choices.hints += ["For episodes of several turns (docs/environments.md):", f"environment: {{{which}}}"]
    system, tools = templated_column(record, SYSTEMS), templated_column(record, TOOLS)
    has_own = isinstance(prompt, list) and prompt[0]["role"] == "system"
    if system is not None and data.system_prompt is None and not has_own:
        choices.suggest("data.system_key", system, f"each row has a system prompt, as in {place}")
    if tools is not None and takes_tools:
        choices.suggest("data.tools_key", tools, f"the chat template writes a row's tools, as in {place}")


def _needs_template(choices: Choices, codec: TextCodec) -> bool:
    """Whether the first prompt is a text without the marks of the chat template that the tokenizer has."""
    data = choices.config.data
    file = find_sources(data, "train")[0].files[0]
    row = next(read_rows(file.path, file.keys))
    if isinstance(row, RowProblem):
        raise DataError([row])
    formats = prompt_format(data, codec)
    if not isinstance(row.prompt, str) or not formats.templates:
        return False
    plain = PlainPrompts(choices.config, formats)
    plain.add([(row, PromptText(text=row.prompt, rendered=False))])
    given = data.system_prompt is not None or data.system_key is not None
    return given or any(plain.problems("data.train"))


def _suggest_batch(choices: Choices, train: RowSample, machine: HostMachine) -> None:
    """Suggest prompts, completions and iterations; fewer on a CPU."""
    grpo = choices.config.grpo
    prompts, group = (grpo.prompts_per_iteration, grpo.group_size) if machine.has_gpus else (16, 8)
    rows = f"{'' if train.whole else 'about '}{train.num_rows} rows"
    if train.num_different < train.num_rows:
        rows += f", of which {train.num_different} are different prompts"
    few = train.num_different < prompts
    why = (
        f"all of the {rows}" if few else _reason("grpo.prompts_per_iteration") if machine.has_gpus else "few, on a CPU"
    )
    choices.suggest("grpo.prompts_per_iteration", min(prompts, train.num_different), why)
    choices.suggest("grpo.group_size", group, _reason("grpo.group_size") if machine.has_gpus else "few, on a CPU")
    grpo = choices.config.grpo
    updates = math.gcd(grpo.updates_per_iteration, grpo.prompts_per_iteration * grpo.group_size)
    choices.suggest("grpo.updates_per_iteration", updates, "divides the samples of an iteration")
    epoch = train.num_rows / grpo.prompts_per_iteration
    iterations = min(max(math.ceil(epoch), _FEWEST_ITERATIONS), _MOST_ITERATIONS)
    choices.suggest("run.iterations", iterations, f"{iterations / epoch:.2g} epochs of {rows}")


def _suggest_prompt_tokens(choices: Choices, spec: ModelSpec, samples: list[RowSample]) -> None:
    """Suggest the longest prompt; prompts that leave less than half of the model's positions are left out."""
    lengths = sorted(length for sample in samples for length in sample.lengths)
    longest, most = lengths[-1], spec.max_positions // 2
    whole = all(sample.whole for sample in samples)
    read = "" if whole else f" of the first {len(lengths)} rows"
    usual = lengths[math.ceil(0.95 * len(lengths)) - 1]
    why = f"95 % of the prompts{read} have at most {usual} tokens, the longest {longest}"
    # Rows that were not read may be longer.
    limit = -(-longest * (1 if whole else 2) // _STEP) * _STEP
    if longest > most:
        over = sum(1 for length in lengths if length > most)
        drop = f"{over} of {len(lengths)} prompts{read} exceed half of the model's {spec.max_positions} positions"
        choices.suggest("data.overlong_prompts", "drop", drop)
    elif not whole:
        choices.suggest("data.overlong_prompts", "drop", "rows that were not read may be longer")
    choices.suggest("data.max_prompt_tokens", max(1, min(limit, most)), why)


def _suggest_new_tokens(
    choices: Choices, spec: ModelSpec, codec: TextCodec, train: RowSample, machine: HostMachine
) -> None:
    room = spec.max_positions - choices.config.data.max_prompt_tokens
    if all(isinstance(reward, ExactMatchReward) for reward in choices.config.reward):
        longest = max(len(ids) for ids in codec.encode(train.answers))
        wanted, why = -(-(longest + 1) // _STEP) * _STEP, f"the longest answer has {longest} tokens"
    else:
        wanted = _GPU_TOKENS if machine.has_gpus else _CPU_TOKENS
        why = "room to reason" if machine.has_gpus else "short, on a CPU"
    if wanted > room:
        wanted, why = max(1, room), f"what prompts leave of the model's {spec.max_positions} positions"
    choices.suggest("grpo.max_new_tokens", wanted, f"{why}; samples with finish reason length are cut off by it")
