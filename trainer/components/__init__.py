"""Parts of the training loop. These are the public names."""

from trainer.lazy import lazy_exports

_NAMES = {
    "CheckpointError": "checkpoint",
    "Checkpointer": "checkpoint",
    "clip_gradients": "grad_norm",
    "global_grad_norm": "grad_norm",
    "count_valid": "loss",
    "token_losses": "loss",
    "build_lr_scheduler": "lr_scheduler",
    "MetricsLogger": "metrics",
    "build_optimizer": "optimizer",
}
__getattr__, __dir__ = lazy_exports(__name__, _NAMES)
__all__ = list(_NAMES)
