"""A step as one line of a terminal: progress, loss, speed, resources, time left."""

from datetime import timedelta

from trainer.components.step_metrics import StepMetrics
from trainer.runtime.console import line_width


def console_line(
    metrics: StepMetrics, total_steps: int, eta_seconds: float, *, position: str = "tok"
) -> str:
    """Return one line: progress, loss, speed, resources, time left.

    If the device's peak is known, its used share replaces `max`, the largest loss of a sequence. `data`, the share of
    time that waits for data, is shown from 5 % on. A line longer than `line_width()` gets single blanks. If it is still
    too long, it loses `data`, then `max`, then the resources. The shortest form is returned even if it is too long.

    Args:
        metrics: Metrics of the step.
        total_steps: Steps of the run.
        eta_seconds: Time left.
        position: Short word for the items of a sample, such as tokens, or points of a field.
    """
    loss_max = f" (max {_loss(metrics.loss_max, 2)})" if metrics.mfu is None else ""
    data = (
        f"data {metrics.data_loading_fraction:.0%}"
        if metrics.data_loading_fraction >= 0.05
        else ""
    )
    resources = (
        "" if metrics.mfu is None else f"{metrics.mfu:.0%} mfu",
        f"{metrics.seconds_per_step:.{1 if metrics.seconds_per_step < 100 else 0}f} s",
        f"{metrics.memory_gib:.{1 if metrics.memory_gib < 10 else 0}f} GiB",
    )
    speed = metrics.tokens_per_second
    for detail, extra, used in (
        (loss_max, data, resources),
        (loss_max, "", resources),
        ("", "", resources),
        ("", "", ()),
    ):
        parts = [
            f"step {metrics.step:>{len(str(total_steps))}}/{total_steps}",
            f"loss {_loss(metrics.loss)}{detail}",
            f"grad {metrics.grad_norm:.{2 if metrics.grad_norm < 100 else 0}f}",
            f"lr {_short_power(metrics.lr)}",
            f"{speed:,.0f} {position}/s"
            if speed < 1e5
            else f"{speed / 1e6:,.2f}M {position}/s",
            *used,
            extra,
            f"eta {duration(eta_seconds)}" if metrics.step < total_steps else "",
        ]
        for blanks in ("  ", " "):
            line = blanks.join(filter(None, parts))
            if len(line) <= line_width():
                return line
    return line


def duration(seconds: float) -> str:
    """Return a time as 4:40, 1:02:03, or from a day on 2d03h.

    Args:
        seconds: The time.
    """
    seconds = round(seconds)
    if seconds >= 86400:
        return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"
    text = str(timedelta(seconds=seconds))
    return text.removeprefix("0:").removeprefix("0") if seconds < 3600 else text


def _loss(loss: float, digits: int = 3) -> str:
    """Return a loss as text with at least two digits: 5.191, or 3.1e-3 for the small losses of regressions."""
    return f"{loss:.{digits}f}" if loss >= 0.1 or loss == 0 else _short_power(loss)


def _short_power(number: float) -> str:
    """Return 2.3e-3 for 0.0023."""
    digits, _, power = f"{number:.1e}".partition("e")
    return f"{digits}e{int(power)}"
