"""The engine on megatron-core; no other package imports megatron.

Importing it prepares megatron-core for the host: a no-op where CUDA is available, `cpu_shim` elsewhere. That must
happen before the first `import megatron.core`, so it happens here.
"""

from trainer_service.megatron_engine import cpu_shim

ON_CPU = cpu_shim.install()
