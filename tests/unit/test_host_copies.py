"""Laws of copies in host memory: nothing changes what is being written, and only the device waits."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.checkpoint import host_copies
from trainer.checkpoint.host_copies import HostCopies

UPDATED = ("model.weight", "optimizer.weight.exp_avg")


def state_on(device: str) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(1 << 20, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = {"model.weight": weight.detach(), "model.buffer": torch.ones(1 << 20, device=device)}
    return state | {UPDATED[1]: optimizer.state[weight]["momentum_buffer"]}, optimizer


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_copies_are_of_their_own_moment(device: str) -> None:
    state, optimizer = state_on(device)
    copies = HostCopies(optimizer)
    for _ in range(3):
        wanted = {name: x.clone().cpu() for name, x in state.items()}
        copies.start(state, updated=UPDATED)
        state["model.buffer"].add_(1)  # by a forward
        optimizer.step()
        copies.wait()
        assert copies.tensors.keys() == wanted.keys()
        assert all(torch.equal(copies.tensors[name], x) for name, x in wanted.items())
        assert all(x.is_pinned() == (device == "cuda") for x in copies.tensors.values())


def test_on_a_gpu_buffers_are_copied_at_once_and_the_update_waits() -> None:
    """The order of what is given to the streams, without a GPU."""
    done: list[str] = []
    streams = {"compute": mock.Mock(name="compute"), "copy": mock.Mock(name="copy")}
    current = ["compute"]

    @contextmanager
    def entered(stream: mock.Mock):
        current.append(next(name for name, known in streams.items() if known is stream))
        yield
        current.pop()

    for name, stream in streams.items():
        stream.wait_stream.side_effect = lambda other, name=name: done.append(
            f"{name} waits for {next(n for n, known in streams.items() if known is other)}"
        )
        stream.wait_event.side_effect = lambda _, name=name: done.append(f"{name} waits for the copies")
    event = mock.Mock()
    event.record.side_effect = lambda: done.append(f"{current[-1]}: copied")
    event.synchronize.side_effect = lambda: done.append("the host waits")
    cuda = mock.Mock()
    cuda.Stream.return_value, cuda.Event.return_value = streams["copy"], event
    cuda.current_stream.side_effect, cuda.stream = lambda: streams[current[-1]], entered
    with FakeTensorMode():
        state, optimizer = state_on("cuda")
        copies = HostCopies(optimizer)
        copy = copies._copy
        with (
            mock.patch.object(host_copies.torch, "cuda", cuda),
            mock.patch.object(host_copies, "_buffer", lambda x: torch.empty_like(x, device="cpu")),
            mock.patch.object(
                copies, "_copy", lambda state, names: (done.append(f"{current[-1]}: {len(names)}"), copy(state, names))
            ),
        ):
            optimizer.register_step_post_hook(lambda *_: done.append("update"))
            copies.start(state, updated=UPDATED)
            optimizer.step()
            copies.wait()
    assert done == [
        "compute: 1",
        "copy waits for compute",
        "copy: 2",
        "copy: copied",
        "compute waits for the copies",
        "update",
        "the host waits",
    ]
