"""What the figures of train.json mean."""

DEFINITIONS = {
    "step": (
        "log-probs of the policy that the step starts from, then 4 optimizer updates, each forward, backward, clipping "
        "and AdamW, on given samples in float32; without generation and weight sync"
    ),
    "ours_tp1, ours_tp2, ours_dp2, ours_pp2": (
        "MegatronEngine.train_step with one rank, and with two in each layout; ranks share the threads"
    ),
    "padded": (
        "the same step in plain transformers and torch: all samples padded to the longest prompt and the longest "
        "completion (as TRL pads), sdpa attention, logits of completion positions only, torch's fused AdamW"
    ),
    "trl": (
        "GRPOTrainer of TRL in an environment of its own, from its rollout_func, which gives it the samples, to the "
        "next call of it; bfloat16 and gradient checkpointing off"
    ),
    "floor": (
        "FLOPs / rate: matrix products of the step without padding (a forward pass of the samples of updates 2 to 4, "
        "then three times that work for all), at the rate of the fastest of many square float32 products, measured anew"
    ),
    "tokens_per_s": "prompt and completion tokens of all samples, once, per second of the step",
    "peak_mib": "highest resident memory during a step, of all ranks together; rise_mib: above what was held before it",
    "vs_padded, vs_trl, vs_floor": (
        "seconds of the other way / seconds of ours: medians of the ratios in a repetition. At 100 M parameters DP2 "
        "and PP2 have a pass of their own, with the other ways measured again: all together would not fit into memory"
    ),
    "long_tail_vs_padded, equal_vs_padded": "vs_padded of ours_tp1, at the model where it is lowest",
    "vs_floor_100m": "vs_floor of ours_tp1 at 100 M parameters and equal lengths",
    "equal, uniform, long_tail": (
        "completions of equal length; evenly spread up to twice that; lognormal (sigma 1.2), at most 8 times the mean; "
        "prompts are equally long"
    ),
    "agreement": (
        "after the warm-up steps, from the same weights: |difference| of the last loss, and largest |difference| of a "
        "weight, to padded, which shuffles no samples as TRL does; largest_weight_change: by the steps"
    ),
}
