"""Laws of replacing a module's forward: once for each feature, in the stated order, and nobody's own is dropped."""

import pytest
from torch import nn

from longshard.sharding.forward import ORDER, replace_forward


def test_features_replace_a_forward_in_their_order() -> None:
    module = nn.Identity()
    for feature in ORDER:
        replace_forward(module, feature, lambda x, feature=feature: feature)
        assert module(0) == feature


@pytest.mark.parametrize(("first", "second"), [(a, b) for i, b in enumerate(ORDER) for a in ORDER[i:]])
def test_out_of_order_or_twice_is_refused(first: str, second: str) -> None:
    module = nn.Identity()
    replace_forward(module, first, module.forward)
    with pytest.raises(RuntimeError, match=f"{second} cannot replace the forward of this Identity after {first}"):
        replace_forward(module, second, module.forward)


@pytest.mark.parametrize("feature", ORDER)
def test_a_forward_of_the_instance_is_never_dropped(feature: str) -> None:
    module = nn.Identity()
    module.forward = lambda x: x + 1
    if feature in ORDER[-2:]:  # the compiler and offloading take what they find
        replace_forward(module, feature, module.forward)
        assert module(1) == 2
    else:
        with pytest.raises(RuntimeError, match="would drop the forward that was set on this Identity itself"):
            replace_forward(module, feature, lambda x: x)
