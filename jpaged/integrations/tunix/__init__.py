"""google-tunix on jpaged.

`JPagedRollout` (rollout.py) is a rollout engine for its RLCluster; sampler.py has a Sampler for its
distributed worker, which google-tunix has from 0.1.8 on; models.py describes its models.
"""

from jpaged.integrations.tunix.rollout import JPagedRollout

__all__ = ["JPagedRollout"]
