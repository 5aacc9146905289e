"""The families of models, a table of switches each: a new one is a Family and its line here.

What a switch does is the decoder's matter (`models/layers`) and the table's (`models/params`).
"""

from jpaged.models.families.family import Family
from jpaged.models.families.llama import LLAMA
from jpaged.models.families.mistral import MISTRAL
from jpaged.models.families.qwen import QWEN2, QWEN3

FAMILIES = {family.model_type: family for family in (QWEN3, QWEN2, LLAMA, MISTRAL)}

__all__ = ["FAMILIES", "Family"]
