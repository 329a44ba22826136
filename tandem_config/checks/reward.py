"""Checks of the rewards together; what concerns one of them alone is in its section."""

from collections import Counter

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import EnvironmentReward, OverlongReward


def entry_key(config: RunConfig, place: int) -> str:
    """Return the key of a reward: `reward`, or `reward[1]` if there are several."""
    return "reward" if len(config.reward) == 1 else f"reward[{place}]"


@check("reward")
def _names_differ(config: RunConfig) -> Problems:
    labels = [reward.label for reward in config.reward]
    label, count = Counter(labels).most_common(1)[0]
    if count > 1:
        place = labels.index(label, labels.index(label) + 1)
        yield problem(
            f"{entry_key(config, place)}.name",
            label,
            f"is the name of {count} rewards, and metrics are by name",
            "give each a `name:` of its own",
        )


@check("reward")
def _one_is_the_accuracy(config: RunConfig) -> Problems:
    marked = [place for place, reward in enumerate(config.reward) if reward.accuracy]
    if len(marked) > 1:
        yield problem(
            f"{entry_key(config, marked[1])}.accuracy",
            "true",
            f"is set for {len(marked)} rewards, and the accuracy is one of them",
            "leave it out of all others",
        )


@check("reward")
def _something_is_rewarded(config: RunConfig) -> Problems:
    if all(reward.weight == 0 for reward in config.reward):
        yield problem(
            f"{entry_key(config, 0)}.weight",
            "0",
            "leaves nothing to train on: every reward is 0",
            "give one of them a weight",
        )


@check("reward", "grpo.max_new_tokens")
def _overlong_has_a_beginning(config: RunConfig) -> Problems:
    longest = config.grpo.max_new_tokens
    for place, reward in enumerate(config.reward):
        if isinstance(reward, OverlongReward) and (reward.cache_tokens or 0) > longest:
            yield problem(
                f"{entry_key(config, place)}.cache_tokens",
                reward.cache_tokens,
                f"is more than grpo.max_new_tokens = {longest}: even an empty completion would be too long",
                f"a part of it, e.g. {max(1, longest // 5)}",
            )
            return


@check("environment", "grpo.stop", "evaluation")
def _turns_can_continue(config: RunConfig) -> Problems:
    """Refuse what SGLang looks for in its own tokens only: completions continue after an answer."""
    penalized = [chosen for chosen in config.evaluation_sets() if chosen.repetition_penalty != 1.0]
    if config.environment is not None and config.grpo.stop:
        why = "ends completions at texts, which is not possible where they have several turns (environment)"
        suggestion = "leave it out: the chat template's own tokens end a turn"
        yield problem("grpo.stop", list(config.grpo.stop), why, suggestion)
    elif config.environment is not None and penalized:
        why = f"{penalized[0].name}: a repetition_penalty is not possible where there are several turns (environment)"
        yield problem("evaluation.sets", penalized[0].repetition_penalty, why, "leave it out")


@check("environment", "reward")
def _something_gives_the_reward(config: RunConfig) -> Problems:
    """Refuse a reward that nothing gives: tools answer calls, and an environment of one's own gives rewards."""
    of_episodes = [place for place, reward in enumerate(config.reward) if isinstance(reward, EnvironmentReward)]
    if of_episodes and (config.environment is None or config.environment.tools):
        why = "there is no environment" if config.environment is None else "tools give no reward"
        suggestion = "set environment.function, or score the last turn with another kind of reward"
        yield problem(f"{entry_key(config, of_episodes[0])}.kind", "environment", f"needs one: {why}", suggestion)
