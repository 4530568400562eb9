"""Law: on GPUs the job's group is NCCL alone, bound to the rank's GPU; gloo is added only for tensors of CPUs."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from trainer.config.loader import parse_command_line
from trainer.runtime.process_group import Process, backend_settings, process_group

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "cpu_tensors", "expected"),
    [
        (torch.device("cpu"), False, {"backend": "gloo"}),
        (torch.device("cpu"), True, {"backend": "gloo"}),
        (GPU, False, {"backend": "nccl", "device_id": GPU}),
        (GPU, True, {"backend": "cpu:gloo,cuda:nccl"}),
    ],
)
def test_backends(device: torch.device, cpu_tensors: bool, expected: dict) -> None:
    assert backend_settings(device, cpu_tensors=cpu_tensors) == expected


@pytest.mark.parametrize("offloads", [False, True])
def test_the_group_of_a_rank_with_a_gpu(offloads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    init, ended = mock.Mock(), mock.Mock()
    monkeypatch.setattr(Process, "device", GPU)
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock())
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "destroy_process_group", ended)
    config = parse_command_line([]).config
    with process_group(Process(1, 1, 2), config.comm, cpu_tensors=offloads):
        pass
    options = init.call_args.kwargs
    assert options | backend_settings(GPU, cpu_tensors=offloads) == options
    assert ("device_id" in options) != offloads
    ended.assert_called_once()


def test_a_record_that_cannot_be_written_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.runtime import process_group as module

    monkeypatch.setattr(module, "is_peer_failure", lambda _error: True)
    dump = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(module, "_dump_flight_record", dump)
    with (
        pytest.raises(RuntimeError, match="the peer is gone"),
        process_group(Process(0, 0, 1), parse_command_line([]).config.comm),
    ):
        raise RuntimeError("the peer is gone")
    dump.assert_called_once()
    assert not dist.is_initialized()


@pytest.mark.parametrize("offloads", [False, True])
def test_a_rank_asks_for_gloo_where_it_offloads(offloads: bool, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from trainer.commands import rank
    from trainer.runtime import process_group as module

    class Seen(Exception):
        pass

    opened = mock.Mock(side_effect=Seen)
    monkeypatch.setattr(module, "process_group", opened)
    monkeypatch.setattr(rank, "report", mock.Mock())
    monkeypatch.setattr("trainer.runtime.reports.Reports", mock.Mock())
    monkeypatch.setattr("trainer.components.out_of_memory.out_of_memory_explained", lambda _job: nullcontext())
    arguments = [f"--job.dump_folder={tmp_path}", "--job.device=cpu"]
    arguments += ["--training.enable_cpu_offload"] * offloads
    assert rank.main(arguments) == 1
    assert opened.call_args.kwargs == {"cpu_tensors": offloads}
