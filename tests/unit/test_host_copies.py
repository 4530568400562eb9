"""Laws of copies in host memory: nothing changes a copy while it is written, and only the device waits."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.checkpoint import host_copies
from trainer.checkpoint.host_copies import HostCopies

pytestmark = pytest.mark.about("trainer/runtime/host_memory.py")
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
    """Check the order of the work on the streams, without a GPU."""
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
            mock.patch.object(host_copies, "_buffer", lambda x, _: torch.empty_like(x, device="cpu")),
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


def test_page_locked_memory_is_as_large_as_the_state() -> None:
    """PyTorch's allocator would round 3 x 5 numbers up to a power of two; also the memory of a DTensor's shard."""
    runtime = mock.Mock()
    runtime.cudaHostRegister.return_value = 0
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = dist.init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.zeros(3, 5), mesh, [Shard(0)], run_check=False)
        for x in (torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(5, 3).T, shard, torch.zeros(0)):
            copy = torch.empty_like(x)
            with mock.patch.object(torch.cuda, "cudart", return_value=runtime):
                memory = host_copies._move_to_locked_memory(copy)
            local = copy.to_local() if isinstance(copy, DTensor) else copy
            assert copy.shape == x.shape
            assert local.stride() == memory.stride()
            assert local.data_ptr() == memory.data_ptr()
            copy.copy_(x)
            if size := local.numel() * local.element_size():
                assert runtime.cudaHostRegister.call_args.args == (local.data_ptr(), size, 0)
        assert runtime.cudaHostRegister.call_count == 3
        runtime.cudaHostRegister.return_value = 2
        refusal = (
            r"async_with_pinned_mem' cannot lock 60 more bytes of host memory \(CUDA error 2\); .*, or use 'async'"
        )
        with (
            mock.patch.object(torch.cuda, "cudart", return_value=runtime),
            pytest.raises(MemoryError, match=refusal),
        ):
            host_copies._move_to_locked_memory(torch.zeros(3, 5))
    finally:
        dist.destroy_process_group()
