"""SGLang's out-of-tree platform for hosts without a GPU: plain torch, no AMX, no sgl_kernel.

SGLang calls `activate` in every process that imports it (entry point group `sglang.srt.platforms`).
"""


def activate() -> str | None:
    """Return the name of the platform class; None if there is a GPU, for SGLang's own platform."""
    import torch

    if torch.cuda.is_available():
        return None
    from rollout_service.sglang_cpu.torchvision_stub import install_stub

    install_stub()
    return "rollout_service.sglang_cpu.platform:TandemCpuPlatform"
