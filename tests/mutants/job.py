"""Mistakes around the steps: data, checkpoints, settings, caches and processes."""

from tests.mutants.mutant import Mutant

_PAIRS = "tests/distributed/test_pairs.py"
_CHECKPOINT = "tests/distributed/test_checkpoint.py"
_LOOP = "tests/distributed/test_loop.py"

DATA = (
    Mutant(
        "replicas read the same data",
        "trainer/trainer.py",
        'dp_rank=self.dims.rank("dp"),',
        'dp_rank=self.dims.rank("dp_shard"),',
        _CHECKPOINT,
    ),
    Mutant(
        "the next row comes from the first stream",
        "trainer/data/streams.py",
        "key=lambda stream: stream.samples",
        "key=lambda stream: 0",
        "tests/unit/test_data_loader.py",
    ),
    Mutant(
        "every epoch has the same order",
        "trainer/data/streams.py",
        "_EPOCH, self._stream, self._epoch)",
        "_EPOCH, self._stream, 0)",
        "tests/unit/test_data_loader.py",
    ),
    Mutant(
        "streams that do not fit the ranks are advised",
        "trainer/data/datasets.py",
        "below = min(data_streams, documents) // dp_degree * dp_degree",
        "below = min(data_streams, documents)",
        "tests/unit/test_data_datasets.py",
    ),
    Mutant(
        "labels are not shifted",
        "trainer/data/packing.py",
        "document[start + 1 : start + n + 1]",
        "document[start : start + n]",
        "tests/unit/test_data_packing.py",
    ),
    Mutant(
        "a resumed stream begins its document anew",
        "trainer/data/loader.py",
        '"token": self._token, "samples"',
        '"token": 0, "samples"',
        "tests/unit/test_data_loader.py",
    ),
    Mutant(
        "ranks that read different batches go on",
        "trainer/trainer.py",
        "if len(set(hashes)) > 1:",
        "if len(set(hashes)) > 99:",
        _LOOP,
    ),
)

CHECKPOINTS = (
    Mutant(
        "a resumed run starts its learning rate anew",
        "trainer/checkpoint/checkpointer.py",
        "restart_lr_scheduler(self._lr_scheduler, step)",
        "restart_lr_scheduler(self._lr_scheduler, 0)",
        _CHECKPOINT,
    ),
    Mutant(
        "a resumed run starts its data anew",
        "trainer/checkpoint/checkpointer.py",
        "raise_on_all_ranks(lambda: self._loader.load_state_dict(state.streams), world)",
        "raise_on_all_ranks(lambda: None, world)",
        _CHECKPOINT,
    ),
    Mutant(
        "a sum of damaged bytes is not looked at",
        "trainer/checkpoint/files.py",
        "if archive.testzip() is not None:",
        "if archive.testzip() == 0:",
        "tests/unit/test_checkpoint_files.py",
    ),
    Mutant(
        "what is no tensor is unpickled",
        "trainer/checkpoint/files.py",
        'raise ValueError(f"{read_item.storage_index.fqn} is no tensor")',
        "super().load_bytes(read_item, value)",
        "tests/unit/test_checkpoint_files.py",
    ),
    Mutant(
        "the latest checkpoints are removed, not the oldest",
        "trainer/checkpoint/folder.py",
        "if step <= written][: -k or None]",
        "if step <= written][k:]",
        "tests/unit/test_checkpoint_folder.py",
    ),
    Mutant(
        "a checkpoint of another model is loaded",
        "trainer/checkpoint/checkpointer.py",
        "    check_fits(state, config, model)\n    reader",
        "    reader",
        f"{_CHECKPOINT}::test_what_appears_after_the_check_is_checked_again",
    ),
    Mutant(
        "the next save does not wait for the one under way",
        "trainer/checkpoint/checkpointer.py",
        "        self.wait()\n        started",
        "        started",
        _CHECKPOINT,
    ),
)

SETTINGS = (
    Mutant(
        "FSDP always reshards",
        "trainer/distributed/data_parallel.py",
        'reshard_after_forward=how == "always" or (how == "default" and not pipelined)',
        "reshard_after_forward=True",
        "tests/distributed/test_keys.py",
    ),
    Mutant(
        "parameters stay on the device",
        "trainer/distributed/data_parallel.py",
        "cpu_offload=config.training.enable_cpu_offload",
        "cpu_offload=False",
        "tests/distributed/test_keys.py",
    ),
    Mutant(
        "gradients are always reduced in float32",
        "trainer/distributed/data_parallel.py",
        "getattr(torch, config.training.mixed_precision_reduce)",
        "torch.float32",
        "tests/distributed/test_keys.py",
    ),
    Mutant(
        "logits are never gathered",
        "trainer/distributed/tensor_parallel.py",
        "return Replicate() if disable_loss_parallel else Shard(-1)",
        "return Shard(-1)",
        "tests/distributed/test_keys.py " + _PAIRS,
    ),
    Mutant(
        "garbage is collected every 50 steps",
        "trainer/runtime/garbage.py",
        "if step % freq == 0:",
        "if step % 50 == 0:",
        "tests/distributed/test_keys.py",
    ),
    Mutant(
        "every tenth step is logged",
        "trainer/components/metrics.py",
        "step % self.settings.log_freq == 0",
        "step % 10 == 0",
        "tests/distributed/test_keys.py",
    ),
    Mutant(
        "a key without effect is not told",
        "trainer/job/keys.py",
        "if missing is not None and attrgetter(name)(config) != key.default:",
        "if missing is None and attrgetter(name)(config) != key.default:",
        "tests/unit/test_job_unused.py",
    ),
    Mutant(
        "a key that the run needs is told and not refused",
        "trainer/job/keys.py",
        "if missing.remedy:",
        "if not missing:",
        "tests/unit/test_job_unused.py",
    ),
    Mutant(
        "a number may have any value",
        "trainer/job/keys.py",
        "value is not None and not key.bounds.test(value):",
        "value is not None and not key.bounds:",
        "tests/unit/test_job.py",
    ),
    Mutant(
        "a condition of a key is forgotten",
        "trainer/config/keys.py",
        "when = when if isinstance(when, tuple) else (when,)",
        "when = when if isinstance(when, tuple) else ()",
        "tests/unit/test_config_keys.py",
    ),
    Mutant(
        "any word is near any key",
        "trainer/config/spelling.py",
        "return (shorter > 2) + (shorter > 6) + (shorter > 11)",
        "return 4",
        "tests/unit/test_config_unknown.py",
    ),
    Mutant(
        "only the first wrong setting is told",
        "trainer/config/errors.py",
        "            self._found.append(str(error))",
        "            self._found = self._found or [str(error)]",
        "tests/unit/test_config_unknown.py",
    ),
    Mutant(
        "the refused folder is suggested",
        "trainer/config/writable.py",
        "if is_writable(folder) and refused",
        "if refused",
        "tests/unit/test_writable.py",
    ),
    Mutant(
        "a step that grows with the sequence is not told",
        "trainer/config/loader.py",
        "not 0 < before < now:",
        "not 0 < now < before:",
        "tests/unit/test_config_presets.py",
    ),
)

CACHES = (
    Mutant(
        "ranks take each other's compiled code",
        "trainer/transforms/compile.py",
        "{_TAG}{dims.rank('world')} {dims.group_names()}",
        "{_TAG}",
        "tests/distributed/test_compile.py::test_code_that_another_compiled_is_not_taken",
    ),
)

PROCESSES = (
    Mutant(
        "ranks outlive their launcher",
        "trainer/commands/rank.py",
        "        end_with(launcher)\n",
        "        pass\n",
        "tests/integration/test_launcher_killed.py",
    ),
    Mutant(
        "a rank that starts after its launcher's end lives on",
        "trainer/runtime/launcher_watch.py",
        "    except ProcessLookupError:\n        return\n    except (Attr",
        "    except ProcessLookupError:\n        ended.poll()\n    except (Attr",
        "tests/unit/test_launcher_watch.py",
    ),
    Mutant(
        "a full disk is told in PyTorch's words",
        "trainer/runtime/full_disk.py",
        "error = error.__cause__ or error.__context__",
        "error = error.__cause__",
        "tests/unit/test_full_disk.py",
    ),
    Mutant(
        "two jobs share a folder",
        "trainer/runtime/dump_folder.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/unit/test_dump_folder.py",
    ),
    Mutant(
        "the launcher forgets the failing rank's exit code",
        "trainer/runtime/launch.py",
        "return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode",
        "return 1",
        "tests/integration/test_launch.py::test_a_killed_rank_ends_the_job",
    ),
    Mutant(
        "the launcher waits for a rank that hangs",
        "trainer/runtime/launch.py",
        "            timers[0].start()\n",
        "",
        "tests/integration/test_failures.py",
    ),
    Mutant(
        "nodes of another job are taken in",
        "trainer/runtime/meeting.py",
        'if node["job"] != me["job"]:',
        'if node["job"] == "":',
        "tests/unit/test_meeting.py",
    ),
    Mutant(
        "a node that has gone is still counted",
        "trainer/runtime/meeting.py",
        "                        connections.remove(key.data)\n",
        "",
        "tests/unit/test_meeting.py",
    ),
    Mutant(
        "ranks follow the order in which nodes came",
        "trainer/runtime/meeting.py",
        'key=lambda c: _order(c.node["name"], nodes.names)',
        "key=lambda c: 0",
        "tests/unit/test_meeting.py",
    ),
    Mutant(
        "a message is waited for as long as when its group was made",
        "trainer/distributed/sharding/exchange.py",
        'if dist.get_backend(group) != "gloo":',
        'if dist.get_backend(group) == "gloo":',
        _LOOP,
    ),
    Mutant(
        "stages wait for each other as long as when their groups were made",
        "trainer/trainer.py",
        "            self.pipeline.set_timeout(seconds)\n",
        "            pass\n",
        "tests/integration/test_failures.py",
    ),
    Mutant(
        "the preset of long context shares a sequence over half of the GPUs",
        "train_configs/llama3_8b_long.toml",
        "context_parallel_degree = 8",
        "context_parallel_degree = 4",
        "tests/unit/test_summary.py",
    ),
    Mutant(
        "a check for another machine needs the files of that machine",
        "trainer/commands/check.py",
        "missing=missing if elsewhere else None",
        "missing=None",
        "tests/integration/test_documented_commands.py",
    ),
    Mutant(
        "what one rank finds wrong does not reach the others",
        "trainer/runtime/agreement.py",
        'if all_reduce(failed, over, "max").item():',
        'if all_reduce(failed, over, "min").item():',
        _CHECKPOINT,
    ),
)
