"""The model families, one file each: tensors and their names, properties, presets. Data only."""

from weightsync.families import llama, qwen2, qwen3, qwen3_moe
from weightsync.families.family import Family

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in (qwen2, qwen3, qwen3_moe, llama)}
