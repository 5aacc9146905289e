"""The families of models: a new one is a Family and its line here.

A family says how its config.json describes layers and what its files call their parameters; what a
layer does and which parameters it has is said in `models/layers`.
"""

from jpaged.models.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from jpaged.models.families.exaone import EXAONE4
from jpaged.models.families.family import Family
from jpaged.models.families.gemma import GEMMA2, GEMMA3
from jpaged.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from jpaged.models.families.glm import GLM4, GLM4_MOE, SOLAR_OPEN
from jpaged.models.families.gpt_oss import GPT_OSS
from jpaged.models.families.granite import GRANITE
from jpaged.models.families.hunyuan import HUNYUAN_DENSE
from jpaged.models.families.hybrid import (
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from jpaged.models.families.internlm import INTERNLM3
from jpaged.models.families.lfm2 import LFM2, LFM2_MOE
from jpaged.models.families.llama import LLAMA
from jpaged.models.families.mimo import MIMO_V2_FLASH
from jpaged.models.families.minimax import MINIMAX_M2
from jpaged.models.families.mistral import MINISTRAL3, MISTRAL, MIXTRAL
from jpaged.models.families.olmo import OLMO2, OLMO3
from jpaged.models.families.phi import PHI3
from jpaged.models.families.qwen import (
    QWEN2,
    QWEN2_5_VL_TEXT,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL_MOE_TEXT,
    QWEN3_VL_TEXT,
)
from jpaged.models.families.seed import SEED_OSS
from jpaged.models.families.smollm import SMOLLM3

_ALL = (
    *(QWEN3, QWEN2, LLAMA, MISTRAL, GEMMA3, GEMMA2, PHI3, SMOLLM3, GRANITE, OLMO2, OLMO3),
    *(MINISTRAL3, GLM4, SEED_OSS, EXAONE4, INTERNLM3, ERNIE4_5, HUNYUAN_DENSE),
    *(QWEN3_MOE, QWEN2_MOE, MIXTRAL, GPT_OSS, GLM4_MOE, SOLAR_OPEN, MINIMAX_M2, ERNIE4_5_MOE),
    *(QWEN2_5_VL_TEXT, QWEN3_VL_TEXT, QWEN3_VL_MOE_TEXT),
    *(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, OLMO_HYBRID, LFM2, LFM2_MOE),
    *(GEMMA4, GEMMA4_UNIFIED, MIMO_V2_FLASH),
)
FAMILIES = {family.model_type: family for family in _ALL}

__all__ = ["FAMILIES", "Family"]
