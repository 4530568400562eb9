"""Run a model that this project did not write inside a context: the interception of its attention, and the watch."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer.distributed.context_parallel.live import LivePlan
from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.integrations.inspection import Allowed
from trainer.integrations.intercept import Interception, is_intercepted
from trainer.integrations.watch import ModelWatch


@contextmanager
def intercepting(
    handle: torch.Tensor, live: LivePlan, model: nn.Module | None, allow_modules: Collection[type | str]
) -> Iterator[None]:
    """Intercept attention under an open plan, of which some must run. Arguments as of `context_parallel`.

    Raises:
        ContextParallelError: as an `Interception` and a `ModelWatch`; at the end, if no attention ran or an entry of
            allow_modules named nothing.
    """
    allowed = Allowed(allow_modules)
    watch = ModelWatch(live, lambda: is_intercepted(handle), model, allowed)
    with Interception(handle, live, watch), watch:
        yield
    if live.calls == 0:
        raise ContextParallelError(
            f"the inputs were cut over {live.mesh.size()} ranks, but no attention ran over them: nothing called "
            "F.scaled_dot_product_attention inside the context; make the model use it (transformers: "
            'attn_implementation="sdpa", not "eager"), and run its forward and backward inside'
        )
    if allowed.unused:
        raise ContextParallelError(
            f"allow_modules of context_parallel names {allowed.unused}, and the model has no such module or kind of "
            "layers; give classes, their names, dotted names of modules, or kinds of layers, and only those it has"
        )
