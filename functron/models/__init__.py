"""Models as pure functions of their parameters, by family; generation, LoRA, scoring and more."""

from functron.models import bert, gpt, llava, lora, mamba, t5, vit
from functron.models.generation import generate
from functron.models.options import Hook, ModelOptions

__all__ = ["Hook", "ModelOptions", "bert", "generate", "gpt", "llava", "lora", "mamba", "t5", "vit"]
