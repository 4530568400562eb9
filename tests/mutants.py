"""Planted mistakes, one line each, and the quick tests that must see them: `make mutants` runs them on copies.

A mutant that survives is a law that nothing checks. A feature adds the mistakes that its tests must see.
"""

from typing import NamedTuple

_CP = "trainer/distributed/context_parallel"
_PAIRS = "tests/distributed/test_pairs.py"
_LAYOUT = "tests/distributed/test_parity.py::test_layout_equals_single_process"
_ATTENTION = "tests/distributed/test_context_parallel.py"
_GUARDS = "tests/distributed/test_context_guards.py"
_CHECKPOINT = "tests/distributed/test_checkpoint.py"
_FAMILY = "tests/distributed/test_model_family.py"
_LOOP = "tests/distributed/test_loop.py"


class Mutant(NamedTuple):
    """In `file`, `old` (which stands there once) becomes `new`; at least one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


LOSS = (
    Mutant(
        "tokens without a label are counted",
        "trainer/components/loss.py",
        "(labels != IGNORE_INDEX).sum(dim)",
        "(labels == labels).sum(dim)",
        "tests/unit/test_components.py",
    ),
    Mutant(
        "the loss is computed in the model's data type",
        "trainer/components/loss.py",
        "logits.to(torch.promote_types(logits.dtype, torch.float32))",
        "logits.to(logits.dtype)",
        "tests/unit/test_components.py",
    ),
    Mutant(
        "each data-parallel rank divides by its own labels",
        "trainer/trainer.py",
        'for batch in batches), self.dims["dp"])',
        'for batch in batches), self.dims["tp"])',
        f"{_LAYOUT}[fsdp2+tp2-float32]",
    ),
    Mutant(
        "the logged loss is that of one part of the sequence",
        "trainer/trainer.py",
        'all_reduce(sums.sum(), self.dims["dp_cp"])',
        'all_reduce(sums.sum(), self.dims["dp"])',
        f"{_LAYOUT}[cp2-float32]",
    ),
    Mutant(
        "losses stay on the last stage",
        "trainer/trainer.py",
        'sums = all_reduce(sums, self.dims["pp"])',
        'sums = all_reduce(sums, self.dims["tp"])',
        f"{_LAYOUT}[pp2-float32]",
    ),
    Mutant(
        "row losses are those of one part of the sequence",
        "trainer/trainer.py",
        'sequence_losses = all_reduce(sums, self.dims["cp"])',
        'sequence_losses = all_reduce(sums, self.dims["tp"])',
        f"{_LAYOUT}[cp2-float32]",
    ),
)

GRADIENTS = (
    Mutant(
        "gradients of norms stay partial sums under TP",
        "trainer/trainer.py",
        "        settle_gradients(parameters)\n",
        "",
        f"{_LAYOUT}[tp2-float32]",
    ),
    Mutant(
        "replicas are not summed beside TP",
        "trainer/distributed/parallel_dims.py",
        'if self.size("dp_replicate") == 1:',
        'if self.size("dp_replicate") == 1 or self.size("tp") > 1:',
        f"{_LAYOUT}[ddp2+tp2-float32]",
    ),
    Mutant(
        "replicas are never summed",
        "trainer/trainer.py",
        "reduce_across_replicas(part, last)",
        "reduce_across_replicas(part, False)",
        f"{_LAYOUT}[ddp2+tp2-float32]",
    ),
    Mutant(
        "gradients are averaged",
        "trainer/distributed/data_parallel.py",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        f"{_LAYOUT}[fsdp2+tp2-float32]",
    ),
    Mutant(
        "gradients of bfloat16 are zero",
        "trainer/trainer.py",
        "clip_gradients(parameters, norm, self.config.training.max_norm)",
        "clip_gradients(parameters, norm, 0.0 if 'bfloat16' in str(self.compute_dtype)"
        " else self.config.training.max_norm)",
        "tests/distributed/test_bfloat16.py",
    ),
    Mutant(
        "gradients are not zeroed between steps",
        "trainer/trainer.py",
        "self.optimizer.zero_grad()",
        "pass",
        _LOOP,
    ),
    Mutant(
        "clipping does nothing",
        "trainer/components/grad_norm.py",
        "torch._foreach_mul_(grads, max_norm / norm)",
        "torch._foreach_mul_(grads, 1.0)",
        f"{_LAYOUT}[cp2-float32]",
    ),
    Mutant(
        "small gradients are scaled up",
        "trainer/components/grad_norm.py",
        "if norm > max_norm:",
        "if norm > 0:",
        "tests/unit/test_components.py",
    ),
    Mutant(
        "the norm counts replicas again",
        "trainer/components/grad_norm.py",
        "total += (norms**2).sum().to(device) / replicas",
        "total += (norms**2).sum().to(device)",
        f"{_LAYOUT}[fsdp2+tp2-float32]",
    ),
    Mutant(
        "the norm is that of one stage",
        "trainer/components/grad_norm.py",
        'all_reduce(total, dims["world"])',
        'all_reduce(total, dims["dp_shard_cp"])',
        f"{_LAYOUT}[pp2-float32]",
    ),
    Mutant(
        "an infinite norm goes into the weights",
        "trainer/trainer.py",
        "if not (math.isfinite(loss) and math.isfinite(norm)):",
        "if not math.isfinite(loss):",
        _LOOP,
    ),
    Mutant(
        "the first step of the warm-up learns nothing",
        "trainer/components/lr_scheduler.py",
        "return (step + 1) / (config.warmup_steps + 1)",
        "return step / (config.warmup_steps + 1)",
        "tests/unit/test_components.py",
    ),
    Mutant(
        "embeddings decay",
        "trainer/components/optimizer.py",
        "p.ndim > 1 and p not in embeddings",
        "p.ndim > 1",
        "tests/unit/test_components.py",
    ),
    Mutant(
        "all parameters start alike",
        "trainer/models/initialization.py",
        'f"{seed}/{name}"',
        'f"{seed}"',
        "tests/unit/test_model.py",
    ),
)

PLANS = (
    Mutant(
        "head_tail gives a rank two pieces from anywhere",
        "trainer/distributed/sharding/layout.py",
        "union([pieces[rank], pieces[-1 - rank]])",
        "union([pieces[rank], pieces[degree + rank]])",
        "tests/unit/test_layout.py",
    ),
    Mutant(
        "balanced forgets what it has dealt",
        "trainer/distributed/sharding/layout.py",
        "heapq.heappush(heap, (load + int(total[stop] - total[start]), rank))",
        "heapq.heappush(heap, (load, rank))",
        "tests/unit/test_layout.py",
    ),
    Mutant(
        "causal hides the token itself",
        f"{_CP}/planning/mask.py",
        "b._replace(upper=whole.kv_len - q_len)",
        "b._replace(upper=whole.kv_len - q_len - 1)",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "a window shows one token more",
        f"{_CP}/planning/mask.py",
        "b._replace(lower=place - window + 1, upper=upper)",
        "b._replace(lower=place - window, upper=upper)",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "an intersection takes the looser bound",
        f"{_CP}/planning/mask.py",
        "bounds = max(x.lower, y.lower), min(x.upper, y.upper)",
        "bounds = min(x.lower, y.lower), min(x.upper, y.upper)",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "document ids that go up by two are not seen",
        f"{_CP}/planning/mask.py",
        "np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))",
        "np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1) == 1)",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "bands may share queries",
        f"{_CP}/planning/mask.py",
        "q_end <= band.q_start < band.q_stop",
        "0 <= band.q_start < band.q_stop",
        "tests/unit/test_mask.py",
    ),
    Mutant(
        "tiles confuse their two diagonals",
        f"{_CP}/planning/tiles.py",
        "(self.last[end] > self.first[end] for end in (0, 1))",
        "(self.last[end] > self.first[end] for end in (1, 0))",
        "tests/unit/test_plan.py",
    ),
    Mutant(
        "the ring sends rows that nobody sees",
        f"{_CP}/planning/needs.py",
        "self._held[key] = intersection(self.keys(rank), self.kv_ranges[owner])",
        "self._held[key] = self.kv_ranges[owner]",
        "tests/unit/test_plan.py",
    ),
    Mutant(
        "rows that the rank on the way has come from their owner too",
        f"{_CP}/planning/schedules.py",
        "yield Message(owner, rank, difference(held, there))",
        "yield Message(owner, rank, held)",
        "tests/unit/test_plan.py",
    ),
    Mutant(
        "all-gather is used for whatever little is seen",
        f"{_CP}/planning/schedules.py",
        "if 2 * wanted >= everything:",
        "if wanted:",
        "tests/unit/test_plan.py",
    ),
    Mutant(
        "auto launches documents one by one",
        f"{_CP}/planning/capabilities.py",
        "if many and calls > _MANY_CALLS:",
        "if many and calls < _MANY_CALLS:",
        "tests/unit/test_kernels.py",
    ),
    Mutant(
        "a forward that was replaced before is dropped",
        "trainer/transforms/forward.py",
        "if late:",
        "if late and not late:",
        "tests/unit/test_forward.py",
    ),
    Mutant(
        "plans are made anew for each step",
        f"{_CP}/planning/methods.py",
        "_KEPT = 16",
        "_KEPT = 0",
        _GUARDS,
    ),
    Mutant(
        "a causal tile with more keys is cut one key off",
        f"{_CP}/planning/lowering.py",
        "extra = kv_stop - kv_start - (q_stop - q_start)\n    if tile",
        "extra = kv_stop - kv_start - (q_stop - q_start) + 1\n    if tile",
        "tests/unit/test_kernels.py",
    ),
    Mutant(
        "auto does not look at the documents",
        "trainer/job/attention.py",
        "batch=batch, hybrids=False",
        "batch=None, hybrids=False",
        "tests/unit/test_auto.py",
    ),
    Mutant(
        "auto takes every element for two bytes",
        "trainer/job/attention.py",
        '{"float64": 8, "float32": 4, "bfloat16": 2}[training.compute_dtype(device_type)]',
        "2",
        "tests/unit/test_auto.py",
    ),
)

EXECUTION = (
    Mutant(
        "a later tile replaces the result",
        f"{_CP}/execution/stages.py",
        "        if call.fresh:\n",
        "        if call:\n",
        _ATTENTION,
    ),
    Mutant(
        "results are merged by the larger weight",
        f"{_CP}/execution/stages.py",
        "new = torch.logaddexp(total_lse, lse)",
        "new = torch.maximum(total_lse, lse)",
        _ATTENTION,
    ),
    Mutant(
        "empty results share their memory",
        f"{_CP}/execution/stages.py",
        "x.numel() > 0 and x.untyped_storage()",
        "x.untyped_storage()",
        _ATTENTION,
    ),
    Mutant(
        "gradients that come home replace each other",
        f"{_CP}/execution/ring.py",
        "put_rows(target, places.places(message.ranges), buffer, add=True)",
        "put_rows(target, places.places(message.ranges), buffer, add=False)",
        _ATTENTION,
    ),
    Mutant(
        "one copy of a replicated head has the gradient",
        f"{_CP}/execution/ulysses.py",
        "target[:, head] += rows",
        "target[:, head] = rows",
        _ATTENTION,
    ),
    Mutant(
        "sinks learn the wrong way",
        f"{_CP}/attention.py",
        "return -(share * (dout",
        "return (share * (dout",
        _ATTENTION,
    ),
    Mutant(
        "the adjoint of an exchange does not add",
        "trainer/distributed/sharding/exchange.py",
        "put_rows(result, places, piece, add=True)",
        "put_rows(result, places, piece, add=False)",
        "tests/distributed/test_region.py",
    ),
    Mutant(
        "bytes of a message are not counted",
        "trainer/distributed/sharding/exchange.py",
        "_count(kind, sum(t.tensor.nbytes for t in transfers if t.is_send))",
        "_count(kind, 0)",
        _ATTENTION,
    ),
    Mutant(
        "replicate leaves the gradients apart",
        f"{_CP}/regions.py",
        "return all_reduce(total, group).to(gradient.dtype)",
        "return total.to(gradient.dtype)",
        "tests/distributed/test_region.py",
    ),
    Mutant(
        "buffers stay cut",
        f"{_CP}/context.py",
        "x.set_(original)",
        "x.set_(x)",
        _GUARDS,
    ),
    Mutant(
        "attention that did not run is not missed",
        f"{_CP}/live.py",
        "if live.calls == 0 and modules",
        "if live.calls == 1 and modules",
        _GUARDS,
    ),
    Mutant(
        "a scale may be negative",
        f"{_CP}/attention.py",
        "if not 0 < scale < math.inf:",
        "if not -math.inf < scale < math.inf:",
        _GUARDS,
    ),
    Mutant(
        "a tangent is lost",
        f"{_CP}/attention.py",
        "if forward_ad._current_level >= 0:",
        "if forward_ad._current_level > 0:",
        _GUARDS,
    ),
    Mutant(
        "a copy of a module is not counted",
        f"{_CP}/marks.py",
        "return Mark(self.group)",
        "return Mark(None)",
        _GUARDS,
    ),
    Mutant(
        "masks of each sequence are those of the first",
        f"{_CP}/live.py",
        "by_sequence([self.mask.sequence(number) for number in sequences])",
        "by_sequence([self.mask.sequence(0) for number in sequences])",
        _PAIRS,
    ),
    Mutant(
        "positions are turned the other way",
        "trainer/models/common/rotary.py",
        "even * cos - odd * sin",
        "even * cos + odd * sin",
        "tests/unit/test_model.py",
    ),
)

MODELS_OF_OTHERS = (
    Mutant(
        "a model may count its part from 0",
        "trainer/integrations/positions.py",
        "restarted = not is_global and bool(",
        "restarted = False and bool(",
        "tests/distributed/test_transformers.py",
    ),
    Mutant(
        "documents excuse any positions",
        "trainer/integrations/positions.py",
        "self.flags |= _NOT_BY_DOCUMENT * (not is_by_document)",
        "self.flags |= 0",
        "tests/distributed/test_transformers.py",
    ),
)

FAMILIES = (
    Mutant(
        "an auxiliary loss is not divided by the labels of the step",
        "trainer/models/common/auxiliary_loss.py",
        "_AddGradient.apply(x, loss / self.labels)",
        "_AddGradient.apply(x, loss)",
        f"{_FAMILY}::test_gradients_are_those_of_the_token_losses_and_the_auxiliary_ones",
    ),
    Mutant(
        "an auxiliary loss is divided by the labels of one micro-batch",
        "trainer/trainer.py",
        "normalise_auxiliary_losses(part, valid.clamp(min=1))",
        'normalise_auxiliary_losses(part, count_valid(batches[0]["labels"]).clamp(min=1))',
        f"{_FAMILY}::test_gradients_are_those_of_the_token_losses_and_the_auxiliary_ones",
    ),
    Mutant(
        "the hook after a step is not called",
        "trainer/trainer.py",
        "self.spec.after_step(self.model_parts, self.dims)",
        "pass",
        f"{_FAMILY}::test_a_checkpoint_of_one_layout_is_loaded_by_another",
    ),
    Mutant(
        "rotary rows of keys keep their order",
        "trainer/models/llama3/state_dict.py",
        'if part in ("attention.wq", "attention.wk"):',
        'if part == "attention.wq":',
        "tests/unit/test_state_dict.py",
    ),
    Mutant(
        "a tensor that is missing is not told",
        "trainer/models/state_dict.py",
        "if wanted:",
        "if not wanted:",
        "tests/unit/test_state_dict.py",
    ),
)

LAYOUTS = (
    Mutant(
        "tied weights come apart under TP",
        "trainer/distributed/tensor_parallel.py",
        "    with preserve_ties(module):\n",
        "    with nullcontext():\n",
        _PAIRS,
    ),
    Mutant(
        "a pipeline averages its micro-batches",
        "trainer/distributed/pipeline_parallel.py",
        '"scale_grads": False',
        '"scale_grads": True',
        f"{_LAYOUT}[pp2-float32]",
    ),
    Mutant(
        "only the first stage of a rank has its rotary table cut",
        "trainer/trainer.py",
        "for part in self.model_parts for table in self.spec.cp_buffers(part)",
        "for part in self.model_parts[:1] for table in self.spec.cp_buffers(part)",
        _PAIRS,
    ),
    Mutant(
        "FSDP leaves out the ranks of one sequence",
        "trainer/distributed/parallel_dims.py",
        '"dp_shard_cp": ("dp_shard", *_CP)',
        '"dp_shard_cp": ("dp_shard",)',
        f"{_LAYOUT}[cp2-float32]",
    ),
    Mutant(
        "micro-batches of a pipeline share a handle",
        "trainer/trainer.py",
        'sequences=batch["tokens"].shape[0],',
        "sequences=1,",
        "tests/distributed/test_pipeline.py " + _PAIRS,
    ),
)

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
        "trainer/data/loader.py",
        "key=lambda stream: stream.samples",
        "key=lambda stream: 0",
        "tests/unit/test_data_loader.py",
    ),
    Mutant(
        "every epoch has the same order",
        "trainer/data/loader.py",
        "_EPOCH, self._stream, self._epoch)",
        "_EPOCH, self._stream, 0)",
        "tests/unit/test_data_loader.py",
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
        "        check_fits(state, self._config, self._model)\n        reader",
        "        reader",
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

METRICS = (
    Mutant(
        "tokens of a sequence count once for each of its ranks",
        "trainer/components/metrics.py",
        'tokens_per_second=per_device * self.dims.size("world")',
        'tokens_per_second=per_device * self.dims.size("world") * self.dims.size("cp")',
        _LOOP,
    ),
    Mutant(
        "the largest row loss is that of a few ranks",
        "trainer/components/metrics.py",
        'all_reduce(largest, self.dims["world"], "max")',
        'all_reduce(largest, self.dims["tp"], "max")',
        "tests/distributed/test_parity.py::test_micro_batches_do_not_change_the_step",
    ),
    Mutant(
        "a resumed run counts its tokens anew",
        "trainer/components/metrics.py",
        "return self.tokens_before + (step - self.start_step)",
        "return (step - self.start_step)",
        _LOOP,
    ),
    Mutant(
        "loss_compare always says the same",
        "scripts/loss_compare.py",
        "agree = max(worst) <= arguments.tolerance",
        "agree = True",
        "tests/unit/test_loss_compare.py",
    ),
)

PROCESSES = (
    Mutant(
        "ranks outlive their launcher",
        "train.py",
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
        "what one rank finds wrong does not reach the others",
        "trainer/runtime/agreement.py",
        'if all_reduce(failed, over, "max").item():',
        'if all_reduce(failed, over, "min").item():',
        _CHECKPOINT,
    ),
)

MUTANTS = (
    *LOSS,
    *GRADIENTS,
    *PLANS,
    *EXECUTION,
    *MODELS_OF_OTHERS,
    *FAMILIES,
    *LAYOUTS,
    *DATA,
    *CHECKPOINTS,
    *SETTINGS,
    *CACHES,
    *METRICS,
    *PROCESSES,
)
