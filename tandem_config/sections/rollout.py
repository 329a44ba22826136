"""Settings of the rollout replicas."""

from typing import Annotated

from pydantic import Field

from tandem_config.sections.base import PositiveFloat, PositiveInt, Section, about

# Most requests of a decode batch that has a CUDA graph: SGLang's own number for large GPUs. It reserves 2 MiB for each,
# and in a step of more the kernels run for longer than their launches.
MAX_GRAPH_REQUESTS = 512


class RolloutSection(Section):
    """The SGLang rollout services."""

    replicas: PositiveInt = Field(
        1, description="Independent engines.", json_schema_extra=about("the smallest run", unit="replicas")
    )
    min_replicas: PositiveInt = Field(
        1,
        description="Fewest replicas with which a run continues while others are lost; those may rejoin.",
        json_schema_extra=about("a run continues as long as one replica generates", unit="replicas"),
    )
    rejoin_timeout_s: Annotated[float, Field(ge=0)] = Field(
        600.0,
        description=(
            "Seconds that a run with fewer than min_replicas waits for a replica to join before it fails, not counting "
            "those in a cluster's queue; completions generated before are kept."
        ),
        json_schema_extra=about("as run.startup_timeout_s: a replica that died has to start again", unit="s"),
    )
    tensor_parallel: PositiveInt = Field(
        1,
        description="Ranks that share one engine.",
        json_schema_extra=about("a small model needs no more than one device", unit="ranks"),
    )
    nodes: PositiveInt = Field(
        1,
        description="Hosts that each engine spans, with as many ranks on each; must divide tensor_parallel.",
        json_schema_extra=about("a model that fits one host syncs and generates faster there", unit="hosts"),
    )
    expert_parallel: PositiveInt = Field(
        1,
        description="Groups among those ranks that divide the experts; must divide tensor_parallel.",
        json_schema_extra=about("dense models have no experts", unit="groups"),
    )
    max_total_tokens: PositiveInt | None = Field(
        None,
        description=(
            "KV cache size per engine, in tokens; null: on GPUs what mem_fraction_static leaves beside the weights, on "
            "CPUs 65,536, or two of the longest samples if that is more."
        ),
        json_schema_extra=about("a GPU's memory is there to be used, a host's is shared", unit="tokens"),
    )
    context_length: PositiveInt | None = Field(
        None,
        description="Longest prompt + completion, in tokens; null: the model's.",
        json_schema_extra=about("the model's config.json has it", unit="tokens"),
    )
    max_running_requests: PositiveInt = Field(
        1024,
        description="Completions that one engine decodes concurrently.",
        json_schema_extra=about("all of a default iteration", unit="completions"),
    )
    max_groups_per_call: PositiveInt = Field(
        1024,
        description="Groups that one GenerateGroups call may ask for.",
        json_schema_extra=about("more than an iteration has; bounds one call's memory", unit="groups"),
    )
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.8,
        description="Share of GPU memory for weights and KV cache (GPUs only).",
        json_schema_extra=about("leaves a fifth for activations and the sync's buffers", unit="share, 0 to 1"),
    )
    serve_model: bool = Field(
        False,
        description=(
            "Load the model's own weights at the start and serve them as policy version 0, instead of waiting for the "
            "trainer's. `tandem evaluate` sets it."
        ),
        json_schema_extra=about("in a run the first sync brings the weights, whatever the replica has"),
    )
    skip_special_tokens: bool = Field(
        False,
        description=(
            "Leave all special tokens out of the texts that rewards, judges, reward servers and maj@k get; false: only "
            "those that end or pad a completion."
        ),
        json_schema_extra=about("a reward sees what the policy wrote, <think> too where it is a special token"),
    )
    seeded: bool = Field(
        False,
        description=(
            "Sample each completion with a seed made of run.seed, iteration, place and number: a run that is repeated "
            "samples the same, up to rounding, whatever its replicas and their order."
        ),
        json_schema_extra=about(
            "free on CPUs; on GPUs the hash of a large vocabulary costs part of a decode step, not measured yet"
        ),
    )
    generate_timeout_s: PositiveFloat = Field(
        1800.0,
        description="Seconds until a generate call is given up.",
        json_schema_extra=about("longer than the longest completions take", unit="s"),
    )
    stall_timeout_s: PositiveFloat = Field(
        60.0,
        description=(
            "Seconds without a token computed while groups run, or without an answer of a rank, after which a replica "
            "ends itself to be started again. Paused engines are not counted; ten times as long before a GPU's first "
            "group (kernels compile) and while CPU ranks compute."
        ),
        json_schema_extra=about("15 decode steps take less, and so does a weight sync's pause of a rank", unit="s"),
    )
