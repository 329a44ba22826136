"""The table of bounds of every field of every request, by message.

tests/house/test_request_bounds.py asserts that it is complete. Bounds are generous: beyond them a value makes no sense
on any machine; the limits of a run are narrower.
"""

from collections import Counter
from typing import Any

from google.protobuf.message import Message

from servicekit.addresses import split_address
from servicekit.rpc.bounds import Bound, Choice, Flag, Items, Number, Rules, SubMessage, Table, Text, check_message

# Ranks of a round: the largest runs that are known have a tenth.
MAX_RANKS = 2**16
# As sync.formation_timeout_s, transfer_timeout_s, bucket_mib (tandem_config/sections/base.py).
# Not nearer to what this service's own configuration says: a coordinator that resumes with longer ones commands
# services that were started with shorter ones. A wait that is too long ends with ABORT, which passes the queue.
TIMEOUT_S = Number(low=0.001, high=86_400)
BUCKET_BYTES = Number(low=2**12, high=2**36, or_zero=True)

_PACKAGE = "tandem_api."
_COUNTER = Number(low=0, high=2**53)
_VERSION = Number(low=0, high=2**41)
# Leaves a run that was restored as many versions again: past _VERSION no step could be taken.
_RESTORED_VERSION = Number(low=0, high=2**40)
_SIZE = Number(low=0, high=MAX_RANKS)
_ID = Text(longest=128, pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OPTIONAL_ID = Text(longest=128, pattern=r"([A-Za-z0-9][A-Za-z0-9._-]*)?")
_NAME = Text(longest=512)  # may come from rows of the user's data
_PATH = Text(longest=4096)
_TEXT = Text(longest=2**25, pattern=r"(?s).*")
_ARRAY = Items(most=2**27, each=None)  # bytes, as many as 2**25 ids or log-probs
_FENCE = SubMessage()

_SIZES = ("tensor", "pipeline", "data", "context", "expert", "expert_tensor", "virtual_pipeline")

BOUNDS: Table = {
    # ---- common ----
    "tandem_api.common.v1.CoordinatorFence": {"worker_id": _OPTIONAL_ID, "token": _COUNTER},
    # ---- weights ----
    "tandem_api.weights.v1.ParallelSizes": {
        **dict[str, Bound].fromkeys(_SIZES, _SIZE),
        "first_stage_layers": _SIZE,
        "last_stage_layers": _SIZE,
        "embedding_counts": Flag(),
        "loss_counts": Flag(),
        "engine": _OPTIONAL_ID,
    },
    "tandem_api.weights.v1.ReplicaSpec": {"name": _ID, "parallel": SubMessage()},
    "tandem_api.weights.v1.Round": {
        "round_id": _ID,
        "policy_version": _VERSION,
        "group": Text(longest=256, pattern=r"[A-Za-z0-9:._-]*"),
        "epoch": _COUNTER,
        "trainer": SubMessage(),
        "replicas": Items(most=2**12, each=SubMessage()),
        "install_mode": Choice(last=2),
        "pause_mode": Choice(last=4),
        "bucket_bytes": BUCKET_BYTES,
        "formation_timeout_s": TIMEOUT_S,
        "transfer_timeout_s": TIMEOUT_S,
        "transport": Choice(last=4),
        "wire_dtype": Text(longest=16, pattern=r"[a-z0-9]*"),
        "disk_folder": _PATH,
        "fence": _FENCE,
        "failed_rounds": _COUNTER,
        "allow_staged_nccl": Flag(),
        "source": _OPTIONAL_ID,
    },
    "tandem_api.weights.v1.RunPhaseRequest": {
        "phase": Choice(last=6),
        "round": SubMessage(required=True),
        "leader_id": _OPTIONAL_ID,
        "then": Items(most=6, each=Choice(last=6)),
    },
    "tandem_api.weights.v1.LoadPublishedRequest": {
        "folder": _PATH,
        "policy_version": _VERSION,
        "round_id": _OPTIONAL_ID,
        "fence": _FENCE,
    },
    "tandem_api.weights.v1.GetChecksumsRequest": {},
    "tandem_api.weights.v1.PoisonWeightsRequest": {},
    "tandem_api.weights.v1.LoadFolderRequest": {"path": _PATH},
    # ---- trainer ----
    "tandem_api.trainer.v1.TakeOverRequest": {"fence": _FENCE},
    "tandem_api.trainer.v1.TrainStepHeader": {
        "step_id": _ID,
        "policy_version": _VERSION,
        "num_updates": Number(low=0, high=2**20),
        "num_samples": Number(low=0, high=2**24),
        "fence": _FENCE,
    },
    "tandem_api.trainer.v1.SampleChunk": {
        "update_index": Number(low=0, high=2**20),
        "sample_ids": Items(most=2**18, each=_NAME),
        # What the samples hold is judged by trainer_service/micro_batches/checks.py, with the model's sizes at hand.
        "prompt_lengths": Items(most=2**18, each=None),
        "completion_lengths": Items(most=2**18, each=None),
        "advantages": Items(most=2**18, each=None),
        "trainable": Items(most=2**18, each=None),
        "continues": Items(most=2**18, each=None),
        **dict[str, Bound].fromkeys(("token_ids_u32", "rollout_logprobs_f32", "loss_mask_u8"), _ARRAY),
    },
    "tandem_api.trainer.v1.TrainStepRequest": {"header": SubMessage(), "chunk": SubMessage()},
    "tandem_api.trainer.v1.ComputeLogprobsRequest": {"chunk": SubMessage(), "reference": Flag()},
    "tandem_api.trainer.v1.SaveCheckpointRequest": {
        "path": _PATH,
        "fence": _FENCE,
        "background": Flag(),
        "background_on_gpus": Flag(),
    },
    "tandem_api.trainer.v1.FinishCheckpointRequest": {"path": _PATH, "fence": _FENCE},
    "tandem_api.trainer.v1.RestorePolicyRequest": {
        "path": _PATH,
        "policy_version": _RESTORED_VERSION,
        "fence": _FENCE,
    },
    "tandem_api.trainer.v1.ExportModelRequest": {"path": _PATH, "fence": _FENCE},
    "tandem_api.trainer.v1.GetStatusRequest": {},
    # ---- rollout ----
    "tandem_api.rollout.v1.TakeOverRequest": {"fence": _FENCE},
    "tandem_api.rollout.v1.SamplingParams": {
        # The narrower limits of each are rollout_service/sampling.py's.
        "temperature": Number(low=0, high=1000),
        "top_p": Number(low=0, high=1),
        "top_k": Number(low=-1, high=2**31 - 1),
        "max_new_tokens": Number(low=0, high=2**24),
        "stop_token_ids": Items(most=2**12, each=Number(low=0, high=2**31)),
        "min_p": Number(low=0, high=1),
        "repetition_penalty": Number(low=0, high=2),
        "stop": Items(most=2**5, each=Text(longest=2**10, pattern=r"(?s).+")),  # any text, line breaks too
    },
    "tandem_api.rollout.v1.PromptGroup": {
        "group_id": _NAME,
        "prompt_ids_u32": _ARRAY,  # rollout_service/sampling.py: the vocabulary's size
        "num_completions": Number(low=0, high=2**16),
        "seed": Number(low=0, high=2**64),
        "samples": Items(most=2**16, each=SubMessage()),
        "keeps_prompt": Flag(),
    },
    "tandem_api.rollout.v1.SamplePrefix": {
        "index": Number(low=0, high=2**16),
        "token_ids_u32": _ARRAY,
        "prompt_ids_u32": _ARRAY,
    },
    "tandem_api.rollout.v1.GenerateRequest": {
        "sampling": SubMessage(),
        "groups": Items(most=2**16, each=SubMessage()),
        "min_policy_version": _VERSION,
        "max_policy_version": _VERSION,
        "cancel": Items(most=2**16, each=_NAME),
    },
    "tandem_api.rollout.v1.LoadPublishedWeightsRequest": {
        "folder": _PATH,
        "policy_version": _VERSION,
        "round_id": _ID,
        "fence": _FENCE,
    },
    "tandem_api.rollout.v1.PauseGenerationRequest": {"mode": Choice(last=4), "fence": _FENCE},
    "tandem_api.rollout.v1.ResumeGenerationRequest": {"fence": _FENCE},
    "tandem_api.rollout.v1.GetStatusRequest": {},
    "tandem_api.rollout.v1.GetChecksumsRequest": {},
    # ---- hosts of an engine ----
    "tandem_api.rollout.v1.JoinRequest": {
        "leader_id": _ID,
        "replica": _ID,
        "nodes": _SIZE,
        "tensor_parallel": _SIZE,
        "host": _SIZE,
        "store_address": Text(longest=300, pattern=r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}"),
        "settings": Text(longest=4096),
    },
    "tandem_api.rollout.v1.BeatRequest": {"leader_id": _ID},
    "tandem_api.rollout.v1.LoadPublishedShardsRequest": {"leader_id": _ID, "published": SubMessage(required=True)},
    "tandem_api.rollout.v1.GetRankChecksumsRequest": {"leader_id": _ID},
    "tandem_api.rollout.v1.LeaveRequest": {
        "leader_id": _ID,
        "reason": Text(longest=2**16, pattern=r"(?s).*"),  # an error's text, of any form
        "failed": Flag(),
    },
    # ---- rewards ----
    "tandem_api.reward.v1.DescribeRequest": {},
    "tandem_api.reward.v1.Sample": {
        "sample_id": _NAME,
        "group": Number(low=0, high=2**24),
        # Texts of any form: prompts and completions, and the columns of a row as JSON.
        **dict[str, Bound].fromkeys(("prompt", "completion", "answer", "columns_json"), _TEXT),
        "num_tokens": Number(low=0, high=2**24),
        "truncated": Flag(),
        "prompt_token_ids": Items(most=2**24, each=None),  # the scorer knows its vocabulary
        "completion_token_ids": Items(most=2**24, each=None),
    },
    "tandem_api.reward.v1.ScoreBatchRequest": {"samples": Items(most=2**16, each=SubMessage())},
    # ---- environments ----
    "tandem_api.environment.v1.DescribeRequest": {},
    "tandem_api.environment.v1.ResetRequest": {
        "episode": _NAME,
        "owner": _NAME,
        "row_json": _TEXT,
        "seed": Number(low=0, high=2**64 - 1),
        "lifetime_s": Number(low=0.001, high=86_400),
    },
    "tandem_api.environment.v1.StepRequest": {
        "episode": _NAME,
        "index": Number(low=0, high=2**24),
        "turn_json": _TEXT,
    },
    "tandem_api.environment.v1.CloseRequest": {"episode": _NAME},
    # ---- coordinator ----
    "tandem_api.coordinator.v1.GetStatusRequest": {},
    "tandem_api.coordinator.v1.GetOverviewRequest": {},
    "tandem_api.coordinator.v1.WatchEventsRequest": {"after_sequence": _COUNTER},
    "tandem_api.coordinator.v1.PauseRequest": {},
    "tandem_api.coordinator.v1.ResumeRequest": {},
    "tandem_api.coordinator.v1.StopAfterStepRequest": {},
}


def _world_size(sizes: Any) -> int:
    """Return the number of ranks of one side; virtual stages and expert sizes use the same ranks."""
    ranks = 1
    for name in ("tensor", "pipeline", "data", "context"):
        ranks *= max(1, int(getattr(sizes, name)))
    return ranks


def _possible_ranks(round_: Any) -> str:
    ranks = _world_size(round_.trainer) + sum(_world_size(replica.parallel) for replica in round_.replicas)
    if ranks > MAX_RANKS:
        return f"it has {ranks} ranks; at most {MAX_RANKS}"
    names = [*(replica.name for replica in round_.replicas), *([round_.source] if round_.source else [])]
    (name, count), *_ = Counter(names).most_common(1) or [("", 0)]
    return f"it has replica {name} {count} times" if count > 1 else ""


def _possible_store(join: Any) -> str:
    try:
        split_address(join.store_address)
    except ValueError as error:
        return f"store_address: {error}"
    return ""


RULES: Rules = {
    "tandem_api.weights.v1.Round": _possible_ranks,
    "tandem_api.rollout.v1.JoinRequest": _possible_store,
}


def check_request(request: object) -> None:
    """Check a message of Tandem; those of health and reflection need no bounds.

    Raises: InvalidRequest: see check_message.
    """
    if isinstance(request, Message) and request.DESCRIPTOR.full_name.startswith(_PACKAGE):
        check_message(request, BOUNDS, RULES)
