"""Components of the training loop. These are the public names."""

from trainer.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "grad_norm": "clip_gradients settle_gradients squared_norm",
        "loss": "count_valid token_losses",
        "lr_scheduler": "build_lr_scheduler",
        "metrics": "MetricsLogger",
        "optimizer": "build_optimizer",
    },
)
