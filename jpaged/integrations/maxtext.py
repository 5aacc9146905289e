"""What MaxText's decoder takes of a rollout: the experts that each token took.

Its weights come by `params_from` ("maxtext_qwen3" and others, see docs/clients.md). This needs no
part of MaxText.
"""

from collections.abc import Mapping

import numpy as np

from jpaged.checks import check_whole
from jpaged.errors import RequestError


def forced_routed_experts(
    arrays: Mapping[str, np.ndarray], *, num_experts: int | None = None
) -> np.ndarray:
    """Return the routes of `to_arrays` or `dialog_arrays` as MaxText's `forced_routed_experts`:
    int32 [B, S, L, A], of the tokens as they lie in prompt_ids and completion_ids one after the
    other (S = P + C), or in a dialog's tokens; L counts the layers with experts alone, in their
    order, and A the experts that each token takes.

    Tokens that no step has computed, the last of a sequence and padding, have -1. A router of
    MaxText that gives these no weight (AI-Hypercomputer/maxtext#4826) divides by the sum of none
    where it normalises weights, and other layers' NaN follow. num_experts has them take experts in
    turn instead: nothing that a loss reads depends on them. RequestError where another token has
    none, as of a request that was cut while it was preempted: its routes are not known.
    """
    if "routed_experts" not in arrays:
        raise RequestError("these arrays have no routed_experts: EngineConfig(routed_experts=True)")
    routes = np.asarray(arrays["routed_experts"], np.int32)
    if "tokens" in arrays:
        is_there = np.asarray(arrays["mask"], bool)
    else:
        masks = [np.asarray(arrays[f"{x}_mask"], bool) for x in ("prompt", "completion")]
        is_there = np.concatenate(masks, axis=1)
    is_known = (routes >= 0).all(axis=(2, 3))
    after = np.flip(np.cumsum(np.flip(is_there, 1), 1), 1)  # tokens from this one to the last
    if (lost := is_there & ~is_known & (after > 1)).any():
        row, place = np.argwhere(lost)[0]
        raise RequestError(
            f"row {row}: the token at place {place} has no routes, and is not the last: its "
            "request was cut while it held no blocks; leave the row out"
        )
    if num_experts is None:
        return routes
    width = routes.shape[3]
    check_whole("num_experts", num_experts, max(width, int(routes.max(initial=-1)) + 1))
    count = np.count_nonzero(~is_known)
    # As many for each expert, so that none has more room to be given than others.
    spread = (np.arange(count)[:, None] * width + np.arange(width)) % num_experts
    routes[~is_known] = spread[:, None, :]
    return routes
