"""Continue a text with a model, token by token. Each token runs the whole text again: there is no cache."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from trainer.distributed.context_parallel.context import context_parallel
from trainer.distributed.parallel_dims import ParallelDims
from trainer.job.record import ResolvedJob


@torch.no_grad()
def continued(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    prompt: Sequence[int],
    *,
    temperature: float,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield the next tokens after `prompt`, without end.

    The model sees the last `training.seq_len` tokens. temperature: 0 takes the likeliest token, 1 draws by the model's
    probabilities.
    """
    ids, device = list(prompt), torch.device(job.device_type)
    while True:
        tokens = torch.tensor([ids[-job.config.training.seq_len :]], device=device)
        logits = _logits(model, job, dims, tokens)
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            chances = torch.softmax(logits.double() / temperature, 0).cpu()
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        yield ids[-1]


def _logits(model: nn.Module, job: ResolvedJob, dims: ParallelDims, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits (V,) of the token after `tokens` (1, S)."""
    if job.attention is None:
        return model.output(model(tokens)[:, -1:])[0, -1]
    # Windows and sinks exist in planned attention only; on one rank the plan has one stage.
    with context_parallel(dims["cp"], buffers=[tokens], buffer_seq_dims=[1], options=job.attention, sequences=1) as cp:
        return model.output(model(tokens, attention_plan=cp.attention_plan)[:, -1:])[0, -1]
