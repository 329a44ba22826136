"""The platform class: every operator takes its plain torch form, attention is our batched one."""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TandemCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without vendor kernels. `OOT` + dispatch key "native" select `forward_native` of every operator."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()  # no triton, no graph capture

    def get_default_attention_backend(self) -> str:
        """SGLang's plain torch attention; ours replaces it by that name."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Operators take their plain torch form."""
        return "native"

    def get_device(self, device_id: int = 0) -> str:
        """Where tensors go: host memory."""
        return "cpu"  # a str: server_args splits it when no device is given

    def empty_cache(self) -> None:
        """None. SGLang's own collects garbage, 13 ms and more, at every flush of the KV cache."""

    def init_backend(self) -> None:
        """Called by SGLang once in each worker, before it builds the attention backend."""
        from rollout_service.sglang_cpu.attention import register

        register()
