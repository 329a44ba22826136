"""The platform class: operators in their plain torch form, and batched attention."""

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
        """Return the name of SGLang's plain torch attention, under which ours is registered."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Select the plain torch form of operators."""
        return "native"

    def get_device(self, device_id: int = 0) -> str:
        """Return the device of tensors, host memory."""
        return "cpu"  # a str: server_args splits it when no device is given

    def empty_cache(self) -> None:
        """Do nothing; SGLang's own method collects garbage, for 13 ms and more, at every flush of the KV cache."""

    def init_backend(self) -> None:
        """Register the attention backend; SGLang calls this in each worker before it builds the backend."""
        from rollout_service.sglang_cpu.attention import register

        register()
