"""A pool of rank processes: forked from a server that has imported torch, so that a case costs a fraction of a second.

A case is an importable function that every rank calls; the pool returns one result a rank. If a rank raises or hangs,
the case fails with its trace, and the pool starts again for the next case.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from scripts.gpu_blocks.block import own_host
from trainer.data.sources.registry import DataSettings
from trainer.data.token_files.catalog import catalog_of

# Imported once, in the server that forks the ranks. It computes nothing, so that it has no threads to lose.
_PRELOAD = [
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental"),
    *("torch.distributed._tools", "torch._dynamo.testing", "torch._inductor.compile_fx"),
    *("trainer.trainer", "train", "tests.distributed.harness"),
]
_HEAVY = [
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "tests.hf_families"),
    *("peft", "diffusers", "tests.distributed.domain_models"),
]


class RankFailedError(AssertionError):
    """A rank of a case raised, died, or did not answer in time."""


class WorkerPool:
    """Ranks on demand: `pool.run(world_size, function, *args)`.

    device: `cpu` (gloo, one thread a rank) or `cuda` (NCCL). If there are fewer GPUs than ranks, ranks share them, see
    `own_host`.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else the server, and a rank that is killed, leave compilers
        self._context = multiprocessing.get_context("forkserver")
        # What the tests of this session have imported, ranks need too.
        self._context.set_forkserver_preload([*_PRELOAD, *(name for name in _HEAVY if name in sys.modules)])
        self._workers: list[tuple[Any, Connection]] = []
        catalog_of(DataSettings("python_stdlib"))  # its token files: these ranks may not start processes

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
        """Call `function(*args)` on ranks 0 to world_size - 1, each with torchrun's variables set; results by rank.

        Raises:
            RankFailedError: with the trace of the rank that failed first.
        """
        gpus = torch.cuda.device_count() if self.device == "cuda" else 0
        if self.device == "cuda" and not gpus:
            raise RankFailedError("no GPU is visible")
        self._grow(world_size)
        # Served from here: a rank that is sooner than the server would wait half a second for its next try.
        store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank, (_, connection) in enumerate(self._workers[:world_size]):
            _send(connection, (variables | own_host(rank, gpus) | {"RANK": str(rank)}, function, args))
        try:
            return self._collect(world_size, time.monotonic() + timeout)
        except BaseException:
            self.stop()  # the other ranks may wait for ever
            raise

    def stop(self) -> None:
        """End all workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _grow(self, world_size: int) -> None:
        for _ in range(world_size - len(self._workers)):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self.device), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, world_size: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, bool]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world_size])}
        while waiting:
            ready = multiprocessing.connection.wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise RankFailedError(f"ranks {sorted(waiting.values())} did not answer in time; failures: {failures}")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    ok, value, is_cause = pickle.loads(connection.recv_bytes())
                except EOFError:
                    ok, value, is_cause = False, "the process died", True
                if ok:
                    results[rank] = value
                    continue
                failures[rank] = (value, is_cause)
                if is_cause:
                    raise RankFailedError(f"rank {rank}: {value}")
        if failures:
            raise RankFailedError(f"lost peers: {failures}")
        return [results[rank] for rank in range(world_size)]


def _send(connection: Connection, message: object) -> None:
    # Plain pickle: torch's own reductions would share tensors through file descriptors.
    connection.send_bytes(pickle.dumps(message))


def free_port() -> int:
    """Return a free port below the ports that the system gives to connections, so that it stays free."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("localhost", port))
            return port


def forget_meshes() -> None:
    """Clear DTensor's caches of meshes: a mesh of the next case looks the same, but has other groups.

    A training process has one set of groups for all its life.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

    # A version that lacks one of these private names does not cache there.
    caches = (
        (debug, "_clear_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
        (getattr(_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_cached", None), "cache_clear"),
        (_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear"),
    )
    for owner, name in caches:
        getattr(owner, name, lambda: None)()


def _serve(connection: Connection, device: str) -> None:
    """Body of a worker: one case after another until the pool hangs up."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(tempfile.gettempdir())
    from tests.distributed.harness import FAMILY_FLAVORS, TEST_FLAVORS
    from trainer.families.decoder_args import LLAMA3 as FLAVORS
    from trainer.families.registry import MODELS
    from trainer.runtime.process_group import is_peer_failure

    FLAVORS.update(TEST_FLAVORS)
    for family, flavors in FAMILY_FLAVORS.items():
        MODELS[family].flavors.update(flavors)
    torch.set_num_threads(1)
    faulthandler.enable()
    gc.freeze()  # a collection after each case would look at all that is imported
    while True:
        try:
            variables, function, args = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        os.environ.update(variables)
        try:
            _send(connection, (True, function(*args), True))
        except Exception as error:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            _send(connection, (False, traceback.format_exc(), not is_peer_failure(error)))
        forget_meshes()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # the next case compiles for itself
        # Models are cyclic, and keep their process groups, with two threads each, until they are collected.
        gc.collect()
