"""Definitions of the figures in sync.json, written into sync.json and sync.md."""

DEFINITIONS = {
    "total": (
        "seconds of a whole update between processes that run: from the trainer's Megatron shards to engines of which "
        "every rank has the new weights and may serve them. Forming groups and starting processes are not in it."
    ),
    "pause": (
        "seconds of total in which the engines may not generate. ours in place: from the PAUSE request to the reply "
        "of COMMIT. ours staged: from the COMMIT request to its reply (COMMIT pauses, installs, resumes). "
        "stock_flattened, stock_per_tensor: from SGLang's pause_generation to its continue_generation, the gather "
        "before it left out. stock_disk: the call of update_weights_from_disk."
    ),
    "ours_*": (
        "a round as the coordinator drives it, over gRPC: PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT. Every byte is "
        "hashed by its sender and verified by its receiver; the stock methods verify nothing. collective: gloo point "
        "to point; colocated: shared memory. Engines are idle, pause mode drain."
    ),
    "ours_*_generating": (
        "the same while every engine generates without end (4 requests at a time), pause mode keep_kv. silence: the "
        "longest time in which a replica finished no completion; typical_silence: the median such time. On the same "
        "cores as the transfer, so this is also a fight for cores. No unmeasured run before. TP2 -> TP2 only."
    ),
    "stock_flattened": (
        "SGLang's update_weights_from_distributed: gather whole Hugging Face tensors, pause, flush, "
        "begin_weight_update, a broadcast to all engine ranks per 512 MiB bucket (load_format flattened_bucket), "
        "end_weight_update, continue."
    ),
    "stock_per_tensor": "the same with a broadcast per tensor, all of a bucket in flight together.",
    "stock_disk": (
        "SGLang's update_weights_from_disk on tmpfs: every trainer rank gathers and writes its share of whole tensors "
        "as safetensors, then the engines load. Until SGLang answers, which is when its first rank is done; lag: what "
        "the others took longer, trip included, not in total."
    ),
    "floor_gloo": (
        "the slowest rank's seconds for the bytes of ours_* collective over bare gloo send/recv: the same messages "
        "between the same ranks, chains included, all started together; from and to memory as large as the shards. No "
        "packing, no headers, no digests, no RPCs."
    ),
    "floor_memcpy": (
        "the slowest rank's seconds to copy as many bytes as it receives between two buffers, all ranks together."
    ),
    "repetition": (
        "in each, every method runs once unmeasured and then measured, in turns; so what one method leaves cold for "
        "another (caches, links) is warmed for all alike."
    ),
    "ratio": (
        "median over the repetitions of the ratio within one repetition. vs_*: their total / total of ours_in_place, "
        "larger is better for us."
    ),
    "vs_stock_flattened": "stock_flattened total / ours_in_place total",
    "vs_stock_per_tensor": "stock_per_tensor total / ours_in_place total",
    "vs_disk": "stock_disk total / ours_in_place total",
    "vs_floor": ("floor_gloo total / ours_in_place total: the whole round, RPCs, digests and verification included"),
    "colocated_vs_collective": "ours_in_place total / ours_colocated_in_place total",
    "staged_pause_share": "ours_staged pause / ours_in_place pause",
    "vs_floor_transfer": "floor_gloo total / the TRANSFER phase of ours_in_place",
    "vs_memcpy_colocated": "floor_memcpy total / ours_colocated_in_place total",
    "colocated_vs_collective_transfer": "TRANSFER of ours_in_place / TRANSFER of ours_colocated_in_place",
    "colocated_vs_stock_flattened": "stock_flattened total / ours_colocated_in_place total",
    "colocated_vs_disk": "stock_disk total / ours_colocated_in_place total",
    "staged_pause_share_generating": "ours_staged_generating pause / ours_in_place_generating pause",
    "stock_pause_vs_staged_pause": "stock_flattened pause / ours_staged pause",
}
