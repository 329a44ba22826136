"""Settings of the rollout replicas."""

from tandem_config.sections.base import PositiveFloat, PositiveInt, Section, setting

# Most requests of a decode batch that has a CUDA graph: SGLang's own number for large GPUs. It reserves 2 MiB for each,
# and in a step of more the kernels run for longer than their launches.
MAX_GRAPH_REQUESTS = 512


class RolloutSection(Section):
    """The SGLang rollout services."""

    replicas: PositiveInt = setting(1, "the smallest run", "replicas")
    """Independent engines."""
    min_replicas: PositiveInt = setting(1, "a run continues as long as one replica generates", "replicas")
    """Fewest replicas with which a run continues while others are lost; those may rejoin."""
    rejoin_timeout_s: float = setting(
        600.0, "as run.startup_timeout_s: a replica that died has to start again", "s", ge=0
    )
    """Seconds that a run with fewer than min_replicas waits for a replica to join before it fails, not counting those
    in a cluster's queue; completions generated before are kept."""
    tensor_parallel: PositiveInt = setting(1, "a small model needs no more than one device", "ranks")
    """Ranks that share one engine."""
    nodes: PositiveInt = setting(1, "a model that fits one host syncs and generates faster there", "hosts")
    """Hosts that each engine spans, with as many ranks on each; must divide tensor_parallel."""
    expert_parallel: PositiveInt = setting(1, "dense models have no experts", "groups")
    """Groups among those ranks that divide the experts; must divide tensor_parallel."""
    max_total_tokens: PositiveInt | None = setting(
        None, "a GPU's memory is there to be used, a host's is shared", "tokens"
    )
    """KV cache size per engine, in tokens; null: on GPUs what mem_fraction_static leaves next to the weights, on CPUs
    65,536, or two of the longest samples if that is more."""
    context_length: PositiveInt | None = setting(None, "the model's config.json has it", "tokens")
    """Longest prompt + completion, in tokens; null: the model's."""
    max_running_requests: PositiveInt = setting(1024, "all of a default iteration", "completions")
    """Completions that one engine decodes concurrently."""
    max_groups_per_call: PositiveInt = setting(1024, "more than an iteration has; bounds a message's memory", "groups")
    """Groups that one message may submit; a replica has at most as many completions at a time as so many groups."""
    mem_fraction_static: float = setting(
        0.8, "leaves a fifth for activations and the sync's buffers", "share, 0 to 1", gt=0, lt=1
    )
    """Share of GPU memory for weights and KV cache (GPUs only)."""
    serve_model: bool = setting(False, "in a run the first sync brings the weights, whatever the replica has")
    """Load the model's own weights at the start and serve them as policy version 0, instead of waiting for the
    trainer's. `tandem evaluate` sets it."""
    skip_special_tokens: bool = setting(
        False, "a reward sees what the policy wrote, <think> too where it is a special token"
    )
    """Leave all special tokens out of the texts that rewards, judges, reward servers and maj@k get; false: only those
    that end or pad a completion."""
    seeded: bool = setting(
        False, "free on CPUs; on GPUs the hash of a large vocabulary costs part of a decode step, not measured yet"
    )
    """Sample each completion with a seed made of run.seed, iteration, place and number: a run that is repeated samples
    the same, up to rounding, whatever its replicas and their order."""
    generate_timeout_s: float = setting(1800.0, "longer than a queue of long completions takes to begin", "s", ge=60)
    """Seconds without a token from a replica that has work, after which its work goes to others. Slow completions come
    in parts of 30 seconds."""
    stall_timeout_s: PositiveFloat = setting(
        60.0, "15 decode steps take less, and so does a weight sync's pause of a rank", "s"
    )
    """Seconds without a token computed while groups run, or without an answer of a rank, after which a replica ends
    itself to be started again. Paused engines are not counted; ten times as long before a GPU's first group (kernels
    compile) and while CPU ranks compute."""
