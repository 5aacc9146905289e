"""google-tunix on jpaged.

`JPagedRollout` (rollout.py) is a rollout engine for its RLCluster; `sampler.py` has a Sampler for its
distributed worker; `models.py` describes its models; `weights.py` follows their weights.
"""

from jpaged.integrations.tunix.rollout import JPagedRollout

__all__ = ["JPagedRollout"]
