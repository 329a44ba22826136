"""Checks Tandem on this machine's GPUs: real services, then GB/s beside the device's copies. `make gpu-check`.

Runs what the machine allows, writes benchmarks/gpu/<device>.json, and reports what it skipped and why:

    attention    the trainer's core attention in torch's kernel against a dense mask, with its gradients: whole
                 sequences, shared prompts and context-parallel ranks' chunks, which have fewer queries than keys
    services     Megatron and SGLang as `tandem run` starts them, with a tiny random model, over NCCL:
      dense        TP2 -> TP2: a round in_place, staged, keep_kv; after each, checksums against SGLang's own loader and
                   log-probs of the rollout against the trainer's; two train steps after --resume against the same two
                   without it
      deaths       TP2 -> 2 x TP1: a receiver is killed in TRANSFER, and one at the first use of its connections; which
                   replicas survive, and seconds from the kill to the committed round against the lease and 3 s
      mixture      TP2 EP2 -> TP2 EP2: in_place and staged with a tiny Qwen3-MoE
      trainer ...  trainers alone: one rank; TP2 DP2 with ZeRO-1, overlaps, offload, recompute, an asynchronous
                   checkpoint, a profile; CP2 DP2 with shared prompts; TransformerEngine's layers and grouped experts
                   where it is installed: the same two steps, a checkpoint read again, an export
                   and for each the peak memory per rank
    speed        random tensors, GB/s and segments/s:
      collective   trainer ranks and receivers over NCCL, a GPU each; or several ranks on one GPU, where NCCL is at
                   least 2.31 and NCCL_MULTI_RANK_GPU_ENABLE=1
      colocated    CUDA IPC between processes on one GPU
      floor        device-to-device copy, and device-to-device copy between GPUs where there are two

Four GPUs run everything; with fewer, services run at TP1 where they can. Every phase of `speed` runs in a thread of its
own, whose current CUDA device is 0, as in gRPC's threads of the services. Exits 1 if a check failed or a case was not
exact, 2 if nothing ran (0 with --allow-skip). `--device cpu` is a dry run of all of it over gloo.
benchmarks/gpu/README.md says what has run where.
"""
