"""Model families: how a config becomes a spec, and what its checkpoints call the weights."""

from collections.abc import Mapping

from octavo.model.families import deepseek, dense, experts, gemma, gpt, llama
from octavo.model.families.base import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for module in (llama, dense, gemma, gpt, experts, deepseek) for family in module.FAMILIES
}
