"""Checks of the rewards together; what concerns one of them alone is in its section."""

from collections import Counter

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import EnvironmentReward, OverlongReward


def entry_key(config: RunConfig, place: int) -> str:
    """Return the key of a reward: `reward`, or `reward[1]` if there are several."""
    return "reward" if len(config.reward) == 1 else f"reward[{place}]"


@check("reward")
def _names_differ(config: RunConfig) -> ConfigProblem | None:
    labels = [reward.label for reward in config.reward]
    label, count = Counter(labels).most_common(1)[0]
    if count == 1:
        return None
    place = labels.index(label, labels.index(label) + 1)
    return problem(
        f"{entry_key(config, place)}.name",
        label,
        f"is the name of {count} rewards, and metrics are by name",
        "give each a `name:` of its own",
    )


@check("reward")
def _one_is_the_accuracy(config: RunConfig) -> ConfigProblem | None:
    marked = [place for place, reward in enumerate(config.reward) if reward.accuracy]
    if len(marked) < 2:
        return None
    return problem(
        f"{entry_key(config, marked[1])}.accuracy",
        "true",
        f"is set for {len(marked)} rewards, and the accuracy is one of them",
        "leave it out of all others",
    )


@check("reward")
def _something_is_rewarded(config: RunConfig) -> ConfigProblem | None:
    if any(reward.weight != 0 for reward in config.reward):
        return None
    return problem(
        f"{entry_key(config, 0)}.weight",
        "0",
        "leaves nothing to train on: every reward is 0",
        "give one of them a weight",
    )


@check("reward", "grpo.max_new_tokens")
def _overlong_has_a_beginning(config: RunConfig) -> ConfigProblem | None:
    longest = config.grpo.max_new_tokens
    for place, reward in enumerate(config.reward):
        if isinstance(reward, OverlongReward) and (reward.cache_tokens or 0) > longest:
            return problem(
                f"{entry_key(config, place)}.cache_tokens",
                reward.cache_tokens,
                f"is more than grpo.max_new_tokens = {longest}: even an empty completion would be too long",
                f"a part of it, e.g. {max(1, longest // 5)}",
            )
    return None


@check("environment", "grpo.stop", "evaluation")
def _turns_can_continue(config: RunConfig) -> ConfigProblem | None:
    """Refuse what SGLang looks for in its own tokens only: completions continue after an answer."""
    if config.environment is None:
        return None
    if config.grpo.stop:
        why = "ends completions at texts, which is not possible where they have several turns (environment)"
        suggestion = "leave it out: the chat template's own tokens end a turn"
        return problem("grpo.stop", list(config.grpo.stop), why, suggestion)
    for chosen in config.evaluation_sets():
        if chosen.repetition_penalty != 1.0:
            why = f"{chosen.name}: a repetition_penalty is not possible where there are several turns (environment)"
            return problem("evaluation.sets", chosen.repetition_penalty, why, "leave it out")
    return None


@check("environment", "reward")
def _something_gives_the_reward(config: RunConfig) -> ConfigProblem | None:
    """Refuse a reward that nothing gives: tools answer calls, and an environment of one's own gives rewards."""
    of_episodes = [place for place, reward in enumerate(config.reward) if isinstance(reward, EnvironmentReward)]
    if not of_episodes or (config.environment is not None and not config.environment.tools):
        return None
    why = "there is no environment" if config.environment is None else "tools give no reward"
    suggestion = "set environment.function, or score the last turn with another kind of reward"
    return problem(f"{entry_key(config, of_episodes[0])}.kind", "environment", f"needs one: {why}", suggestion)
