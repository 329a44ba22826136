"""Weight sync on real GPUs: exactness, and GB/s against the device's own copies. `make gpu-check`.

Runs what the machine allows, writes benchmarks/gpu/<device>.json, and says what it skipped and why:

    collective   trainer ranks and receivers over NCCL, a GPU each; or several ranks on one GPU, where NCCL is at least
                 2.31 and NCCL_MULTI_RANK_GPU_ENABLE=1
    colocated    CUDA IPC between processes on one GPU
    floor        device-to-device copy, and device-to-device copy between GPUs where there are two

Every phase runs in a thread of its own, whose current CUDA device is 0, as the phases of a real round do. Exits 1 if a
case failed or was not exact, 2 if nothing ran (0 with --allow-skip). Nobody has run it on a GPU yet.
"""
