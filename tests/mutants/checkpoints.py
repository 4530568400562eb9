"""Mistakes of saving and loading."""

from tests.mutants.mutant import Mutant

_CHECKPOINT = "tests/distributed/test_checkpoint.py"

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
        "a checkpoint in a store is half removed while it still looks whole",
        "trainer/checkpoint/publishing.py",
        """        (path / STATE_FILE).unlink()
    if ours""",
        """        pass
    if ours""",
        "tests/unit/test_remote_folder.py",
    ),
    Mutant(
        "a save in a store does not say that it has begun",
        "trainer/checkpoint/publishing.py",
        """        _remove_objects(unfinished)
        (unfinished / SAVING_FILE).write_text(claim, encoding="utf-8")""",
        "        _remove_objects(unfinished)",
        "tests/unit/test_remote_folder.py",
    ),
    Mutant(
        "of two jobs that save to one name in a store both are published",
        "trainer/checkpoint/publishing.py",
        'raise OSError(errno.EBUSY, "another job saves there, too")',
        "pass",
        "tests/unit/test_remote_folder.py",
    ),
    Mutant(
        "half an object appears in a store after an error",
        "trainer/checkpoint/files.py",
        "                stream.discard()",
        "                stream.close()",
        "tests/unit/test_remote_folder.py",
    ),
    Mutant(
        "the latest checkpoints are removed, not the oldest",
        "trainer/checkpoint/publishing.py",
        "of_this_run[: -k or None]",
        "of_this_run[k:]",
        "tests/unit/test_checkpoint_folder.py",
    ),
    Mutant(
        "a checkpoint of another model is loaded",
        "trainer/checkpoint/weights.py",
        "    check_fits(state, config, model)\n    return",
        "    return",
        f"{_CHECKPOINT}::test_what_appears_after_the_check_is_checked_again",
    ),
    Mutant(
        "the check sum of the state is not compared",
        "trainer/checkpoint/folder.py",
        "if sum_of_content is not None and sum_of_content != check_sum(content):",
        "if sum_of_content is None and content is None:",
        "tests/unit/test_checkpoint_folder.py",
    ),
    Mutant(
        "the check sum of the metadata is not compared",
        "trainer/checkpoint/files.py",
        "if self._sums.get(_METADATA) not in (None, zlib.crc32(content)):",
        "if self._sums is None:",
        "tests/unit/test_checkpoint_files.py",
    ),
    Mutant(
        "verify counts places and does not look where they are",
        "trainer/checkpoint/verify.py",
        "slabs[bisect_left(edges, start) : bisect_left(edges, stop)]:",
        "slabs[bisect_left(edges, start) : bisect_left(edges, stop)][:0]:",
        "tests/distributed/test_verify.py",
    ),
    Mutant(
        "a rank reads the first columns of a matrix",
        "trainer/checkpoint/hf_reader.py",
        "part = _read_part(stored, [first, *offsets[1:]],",
        "part = _read_part(stored, [first, *[0 for _ in offsets[1:]]],",
        "tests/unit/test_hugging_face.py",
    ),
    Mutant(
        "a conversion keeps the whole model in memory",
        "trainer/checkpoint/files.py",
        "single_file_per_rank=not file_per_tensor",
        "single_file_per_rank=True",
        "tests/unit/test_hugging_face.py",
    ),
    Mutant(
        "initial weights are read in place of the run's own checkpoint",
        "trainer/checkpoint/checkpointer.py",
        "(raise_on_all_ranks(lambda: step_to_load(self._config), world) or 0)",
        "(0 if initial else raise_on_all_ranks(lambda: step_to_load(self._config), world) or 0)",
        "tests/distributed/test_hugging_face.py",
    ),
    Mutant(
        "the other stages of a pipeline are not exported",
        "trainer/checkpoint/export.py",
        '        send_receive([transfer], self._stages.get_group(), kind="export").wait()\n',
        "",
        "tests/distributed/test_hugging_face.py",
    ),
    Mutant(
        "the next save does not wait for the one under way",
        "trainer/checkpoint/checkpointer.py",
        "        self.wait()\n        started",
        "        started",
        _CHECKPOINT,
    ),
    Mutant(
        "on a GPU an update does not wait for the copies of the state",
        "trainer/checkpoint/host_copies.py",
        "        if self._copied is not None:\n            torch.cuda.current_stream().wait_event(self._copied)",
        "        pass",
        "tests/unit/test_host_copies.py",
    ),
    Mutant(
        "memory of the state itself is written in the background",
        "trainer/checkpoint/checkpointer.py",
        "            dcp.save(copies.tensors, **saving)",
        "            dcp.save(tensors, **saving)",
        _CHECKPOINT,
    ),
)
