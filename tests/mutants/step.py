"""Mistakes in a step: loss, gradients, metrics, model families and layouts."""

from tests.mutants.mutant import Mutant

_PAIRS = "tests/distributed/test_pairs.py"
_LAYOUT = "tests/distributed/test_parity.py::test_layout_equals_single_process"
_FAMILY = "examples/toy_family/test_model_family.py"
_LOOP = "tests/distributed/test_loop.py"

_CHUNKS = "tests/unit/test_chunked_loss.py"
LOSS = (
    Mutant(
        "the compiled loss has views of tokens, whose number varies",
        "trainer/tasks/language.py",
        "partial(token_losses, rows=compiled_loss(row_losses, job.compilation))",
        "compiled_loss(token_losses, job.compilation)",
        "tests/distributed/test_balance.py::test_a_balanced_step_equals_one_process",
    ),
    Mutant(
        "the gradient of the weight is summed over chunks in the model's data type",
        "trainer/models/chunked_loss.py",
        "torch.zeros_like(weight, dtype=_precise(weight))",
        "torch.zeros_like(weight)",
        f"{_CHUNKS}::test_the_gradient_of_the_weight_is_summed_in_float32",
    ),
    Mutant(
        "a token without a label has a gradient in a chunk",
        "trainer/models/chunked_loss.py",
        "        grad = grad.masked_fill(missing, 0)\n",
        "",
        f"{_CHUNKS}::test_a_missing_label_counts_nothing_whatever_its_cotangent",
    ),
    Mutant(
        "a token without a label has a gradient for the weight that is made in the forward",
        "trainer/models/chunked_loss.py",
        "h.masked_fill(out[:, None], 0)",
        "h",
        f"{_CHUNKS}::test_a_sum_of_losses_needs_the_logits_once",
    ),
    Mutant(
        "a token without a label has a gradient that is made in the forward",
        "trainer/models/chunked_loss.py",
        "self.hidden.mul_(by).masked_fill_(missing[:, None], 0)",
        "self.hidden.mul_(by)",
        f"{_CHUNKS}::test_a_sum_of_losses_needs_the_logits_once",
    ),
    Mutant(
        "each chunk's part of the gradient of the weight is rounded",
        "trainer/models/chunked_loss.py",
        "total.addmm_(a.to(total.dtype), b.to(total.dtype))",
        "total.add_(a @ b)",
        f"{_CHUNKS}::test_the_gradient_of_the_weight_is_rounded_once",
    ),
    Mutant(
        "gradients of the sum of losses are taken for those of any cotangent",
        "trainer/models/chunked_loss.py",
        "if gradients is not None and not any(grad.stride()):",
        "if gradients is not None:",
        f"{_CHUNKS}::test_other_cotangents_need_the_logits_again",
    ),
    Mutant(
        "gradients of the forward, which the first backward has scaled, serve the second one",
        "trainer/models/chunked_loss.py",
        "gradients, ctx.gradients = ctx.gradients, None\n",
        "gradients = ctx.gradients\n",
        f"{_CHUNKS}::test_a_sum_of_losses_needs_the_logits_once",
    ),
    Mutant(
        "gradients of the forward are scaled by a rounded number",
        "trainer/models/chunked_loss.py",
        "gradients.scale(grad[:1], missing)",
        "gradients.scale(grad[:1].to(hidden.dtype), missing)",
        f"{_CHUNKS}::test_a_scale_is_not_rounded_to_the_type_of_the_model",
    ),
    Mutant(
        "a loss without gradients makes gradients",
        "trainer/models/chunked_loss.py",
        " and torch.is_grad_enabled()",
        "",
        f"{_CHUNKS}::test_what_needs_no_gradient_has_no_product",
    ),
    Mutant(
        "the gradient of the logits is a tensor of its own before it is rounded",
        "trainer/models/chunked_loss.py",
        "torch.exp(logarithms, out=logits).scatter_",
        "logarithms.exp().to(logits.dtype).scatter_",
        f"{_CHUNKS}::test_the_logits_are_read_and_written_as_often_as_docs_performance_says",
    ),
    Mutant(
        "chunks of the loss have as many tokens for any vocabulary",
        "trainer/job/loss.py",
        "min(max(CHUNK_BYTES // (4 * vocabulary) // 128, 1) * 128, CHUNK_TOKENS)",
        "CHUNK_TOKENS",
        "tests/unit/test_summary.py::test_when_the_loss_is_computed_in_chunks",
    ),
    Mutant(
        "a pipeline keeps gradients from the forward to the backward",
        "trainer/models/parallelize.py",
        "in_forward=job.pipeline is None",
        "in_forward=True",
        "tests/distributed/test_chunked_loss.py::test_a_pipeline_makes_no_gradient_in_the_forward",
    ),
    Mutant(
        "each tensor-parallel rank takes its part of the vocabulary for the first one",
        "trainer/models/chunked_loss.py",
        "self.over.get_local_rank() * len(weight)",
        "0 * len(weight)",
        "tests/distributed/test_chunked_loss.py::test_every_gradient_is_that_of_all_logits_at_once[fsdp2+tp2-float64]",
    ),
    Mutant(
        "every chunk of logits is one: all of them exist",
        "trainer/models/chunked_loss.py",
        "max(-(-len(tensors[0]) // self.tokens), 1)",
        "1",
        f"{_CHUNKS}::test_no_tensor_grows_with_the_sequence_but_hidden_states",
    ),
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
        'torch.stack((targets, size)), self.dims["dp"])',
        'torch.stack((targets, size)), self.dims["tp"])',
        f"{_LAYOUT}[fsdp2+tp2-float32]",
    ),
    Mutant(
        "the logged loss is that of one part of the sequence",
        "trainer/components/step_totals.py",
        'all_reduce(torch.cat([mine, device_votes]), dims["world"])',
        'all_reduce(torch.cat([mine, device_votes]), dims["dp"])',
        f"{_LAYOUT}[cp2-float32]",
    ),
    Mutant(
        "row losses are those of one part of the sequence",
        "trainer/components/metrics.py",
        'sequence_losses = all_reduce(sums, self.dims["cp"])',
        'sequence_losses = all_reduce(sums, self.dims["tp"])',
        f"{_LAYOUT}[cp2-float32]",
    ),
)

GRADIENTS = (
    Mutant(
        "gradients of norms stay partial sums under TP",
        "trainer/trainer.py",
        "            settle_gradients(self.parameters)\n",
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
        "clip_gradients(self.parameters, norm, self.config.training.max_norm)",
        "clip_gradients(self.parameters, norm, 0.0 if 'bfloat16' in str(self.compute_dtype)"
        " else self.config.training.max_norm)",
        "tests/distributed/test_bfloat16.py",
    ),
    Mutant(
        "a fused update is not masked",
        "trainer/trainer.py",
        "mask_update(self.optimizer, left_out)",
        "mask_update(self.optimizer, left_out * 0)",
        "tests/distributed/test_loop.py::test_a_gradient_that_is_not_finite_on_one_rank_stops_all_and_changes_nothing",
    ),
    Mutant(
        "the update of the next step is launched before a step is read",
        "trainer/trainer.py",
        "        self.read_step()  # the step before; no update is launched after a step that ends the run\n",
        "",
        "tests/distributed/test_late_read.py tests/distributed/test_skipped_steps.py",
    ),
    Mutant(
        "a checkpoint does not wait for the outcome of its step",
        "trainer/trainer.py",
        "return not self.updates_masked or ends or saves or validates",
        "return not self.updates_masked or ends or validates",
        "tests/distributed/test_late_read.py",
    ),
    Mutant(
        "every step is read at once",
        "trainer/trainer.py",
        "return not self.updates_masked or ends or saves or validates",
        "return True",
        "tests/distributed/test_late_read.py tests/distributed/test_host_reads.py",
    ),
    Mutant(
        "a late step has the learning rate of the next one",
        "trainer/trainer.py",
        "lr, at_once = self.lr_scheduler.get_last_lr()[0], self.needs_outcome(step)",
        "self.lr_scheduler.step(); lr, at_once = self.lr_scheduler.get_last_lr()[0], self.needs_outcome(step)",
        "tests/distributed/test_late_read.py",
    ),
    Mutant(
        "a late step has the position of the next one's data",
        "trainer/components/metrics.py",
        "data.state_dict(), self.data_seconds, ended)",
        "data._loader.state_dict(), self.data_seconds, ended)",
        "tests/unit/test_data_ahead.py::test_a_record_has_the_position_of_the_batches_that_were_taken",
    ),
    Mutant(
        "data are made one step ahead of a late read",
        "trainer/trainer.py",
        "min(1 + self.updates_masked, ",
        "min(1, ",
        "tests/distributed/test_late_read.py",
    ),
    Mutant(
        "a source counts the losses of a skipped step",
        "trainer/components/source_losses.py",
        "torch.where(left_out.bool(), 0, self._of_step)",
        "self._of_step",
        "tests/distributed/test_late_read.py::test_a_step_that_is_left_out_counts_for_no_source",
    ),
    Mutant(
        "a late step ends when it is read, also on a CPU",
        "trainer/components/metrics.py",
        'ended = time.perf_counter() if late and self.device.type == "cpu" else None',
        "ended = None",
        "tests/distributed/test_late_read.py::test_each_logged_step_has_a_time_of_its_own",
    ),
    Mutant(
        "gradients are reduced over the communicator of the gathers",
        "trainer/distributed/data_parallel.py",
        "group=self._group, **settings)",
        "group=group, **settings)",
        f"{_LOOP}::test_gradients_are_reduced_over_a_communicator_of_their_own",
    ),
    Mutant(
        "one rank casts its weights twice",
        "trainer/distributed/data_parallel.py",
        "options.reshard_after_forward and mesh.size(mesh.ndim - 1) > 1",
        "options.reshard_after_forward",
        f"{_LOOP}::test_one_rank_casts_each_weight_once_in_a_micro_batch",
    ),
    Mutant(
        "a group of one rank has a communicator",
        "trainer/distributed/parallel_dims.py",
        "    if len(mine) == 1:\n",
        "    if not mine:\n",
        "tests/distributed/test_communicators.py",
    ),
    Mutant(
        "meshes of the same ranks have groups of their own",
        "trainer/distributed/parallel_dims.py",
        "if of_parts not in self._of_rows:",
        "if True:",
        "tests/distributed/test_communicators.py",
    ),
    Mutant(
        "a skipped step updates the weights",
        "trainer/trainer.py",
        "if updated and not self.updates_masked:",
        "if not self.updates_masked:",
        "tests/distributed/test_skipped_steps.py",
    ),
    Mutant(
        "a skipped step moves the biases of experts",
        "trainer/models/moe.py",
        "torch.where(left_out, 0, change)",
        "change",
        "tests/distributed/test_skipped_steps.py",
    ),
    Mutant(
        "the output projection is gathered when all layers are done",
        "trainer/distributed/data_parallel.py",
        "last_is_apart=last is not None",
        "last_is_apart=False",
        "tests/distributed/test_loop.py::test_the_output_projection_is_gathered_while_the_last_layer_computes",
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
        "total += to_device((norms**2).sum(), total.device) / replicas",
        "total += to_device((norms**2).sum(), total.device)",
        f"{_LAYOUT}[fsdp2+tp2-float32]",
    ),
    Mutant(
        "the norm is that of one stage",
        "trainer/components/grad_norm.py",
        'ranks_of_stage = dims.size("world") // dims.size("pp")',
        'ranks_of_stage = dims.size("world")',
        f"{_LAYOUT}[pp2-float32]",
    ),
    Mutant(
        "an infinite norm goes into the weights",
        "trainer/components/step_guard.py",
        "if math.isfinite(loss) and math.isfinite(norm):",
        "if math.isfinite(loss):",
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

METRICS = (
    Mutant(
        "tokens of a sequence count once for each of its ranks",
        "trainer/components/metrics.py",
        "tokens_per_second=per_device * ranks",
        'tokens_per_second=per_device * ranks * self.dims.size("cp")',
        _LOOP,
    ),
    Mutant(
        "the largest row loss is that of a few ranks",
        "trainer/components/metrics.py",
        'all_reduce(numbers, self.dims["world"], operation)',
        'all_reduce(numbers, self.dims["tp"], operation)',
        "tests/distributed/test_parity.py::test_micro_batches_do_not_change_the_step",
    ),
    Mutant(
        "a resumed run counts its tokens again",
        "trainer/components/metrics.py",
        "return self.tokens_before + (step - self.start_step)",
        "return (step - self.start_step)",
        _LOOP,
    ),
    Mutant(
        "compare always says the same",
        "scripts/compare.py",
        "agree = max(worst) <= arguments.tolerance",
        "agree = True",
        "tests/repository/test_compare.py",
    ),
)

FAMILIES = (
    Mutant(
        "an auxiliary loss is not divided by the tokens of the step",
        "trainer/models/auxiliary_loss.py",
        "_AddGradient.apply(x, loss / self.tokens)",
        "_AddGradient.apply(x, loss)",
        f"{_FAMILY}::test_gradients_are_those_of_the_token_losses_and_the_auxiliary_ones",
    ),
    Mutant(
        "an auxiliary loss is divided by the labels of the step",
        "trainer/trainer.py",
        "normalise_auxiliary_losses(part, positions.clamp(min=1))",
        "normalise_auxiliary_losses(part, valid.clamp(min=1))",
        f"{_FAMILY}::test_gradients_are_those_of_the_token_losses_and_the_auxiliary_ones",
    ),
    Mutant(
        "observers are not told of the end of a step",
        "trainer/trainer.py",
        "observer.end_step(left_out)",
        "pass",
        f"{_FAMILY}::test_a_checkpoint_of_one_layout_is_loaded_by_another",
    ),
    Mutant(
        "rotary rows of keys keep their order",
        "trainer/families/decoder_tensors.py",
        '_ROTATED = ("attention.wq", "attention.wk",',
        '_ROTATED = ("attention.wq",',
        "tests/unit/test_state_dict.py",
    ),
    Mutant(
        "rotary rows of the norm of keys keep their order",
        "trainer/families/decoder_tensors.py",
        ', "attention.q_norm", "attention.k_norm")',
        ', "attention.q_norm")',
        "tests/unit/test_state_dict.py",
    ),
    Mutant(
        "the norm of keys is no part of tensor parallelism: ranks add up the gradients of their own heads alone",
        "trainer/models/parallelize.py",
        'use_local_output=True) for part in "qk"',
        'use_local_output=True) for part in "q"',
        f"{_FAMILY}::test_families_of_the_decoder_equal_one_process[qwen3_biased-fsdp2+tp2]",
    ),
    Mutant(
        "YaRN does not scale attention",
        "trainer/models/rotary.py",
        "angles.cos().mul_(magnitude)",
        "angles.cos()",
        "tests/unit/test_state_dict.py",
    ),
    Mutant(
        "a tensor that is missing is not told",
        "trainer/hugging_face/tensors.py",
        "if missing := [name for name in wanted if name not in found]:",
        "if missing := [name for name in wanted if name in ()]:",
        "tests/unit/test_hugging_face.py",
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
        'settings["scale_grads"] = False',
        'settings["scale_grads"] = True',
        f"{_LAYOUT}[pp2-float32]",
    ),
    Mutant(
        "stages behind the first rotate by the positions of the first rank",
        "trainer/models/decoder.py",
        "if positions is None and attention_plan is not None:",
        "if positions is None and attention_plan is not None and self.tok_embeddings is not None:",
        _PAIRS,
    ),
    Mutant(
        "FSDP leaves out the ranks of one sequence",
        "trainer/distributed/parallel_dims.py",
        '"dp_shard_cp": ("dp_shard", *shared)',
        '"dp_shard_cp": ("dp_shard",)',
        f"{_LAYOUT}[cp2-float32]",
    ),
    Mutant(
        "micro-batches of a pipeline share a handle",
        "trainer/tasks/language.py",
        'sequences=batch["tokens"].shape[0],',
        "sequences=1,",
        "tests/distributed/test_pipeline.py " + _PAIRS,
    ),
)

_EVALUATION = "tests/distributed/test_evaluation.py"
EVALUATION = (
    Mutant(
        "the hidden states of one tensor-parallel rank answer for all",
        "trainer/tasks/evaluation.py",
        '    hidden = whole_sequence(hidden, dims["tp"])\n',
        '    hidden = hidden.repeat(1, dims.size("tp"), 1)\n',
        f"{_EVALUATION}::test_an_answer_is_right_if_all_its_tokens_are_the_likeliest[cp2+tp2]",
    ),
    Mutant(
        "an answer is right if one of its tokens is",
        "trainer/tasks/evaluation.py",
        "Retrieved(round(hits) == prompt.answer_tokens,",
        "Retrieved(hits > 0,",
        f"{_EVALUATION}::test_an_answer_is_right_if_all_its_tokens_are_the_likeliest[cp2+tp2]",
    ),
    Mutant(
        "what fills up a chunk of a text stays in the cache",
        "trainer/components/generation.py",
        "            self.length += new\n",
        "            self.length += filled.shape[1]\n",
        "tests/distributed/test_generation.py::test_tensor_parallel_ranks_write_the_same",
    ),
)

_VALIDATION = "tests/distributed/test_validation.py"
VALIDATION = (
    Mutant(
        "a validation takes the float8 scales of the weights before the update",
        "trainer/tasks/validation.py",
        "        precompute_scales(part, task.config.float8)",
        "        pass",
        f"{_VALIDATION}::test_weights_are_scaled_again_for_float8",
    ),
    Mutant(
        "a run that is stopped validates before it saves",
        "trainer/trainer.py",
        "self.validation is None or self.stop_reason or",
        "self.validation is None or",
        f"{_VALIDATION}::test_a_run_that_is_stopped_saves_and_does_not_validate",
    ),
    Mutant(
        "rows that fill up the last batch of a validation count",
        "trainer/tasks/validation.py",
        '        arrays["labels"][len(mine) :] = IGNORE_INDEX\n',
        "",
        f"{_VALIDATION}::test_the_loss_is_the_plain_mean",
    ),
)

_LORA = "tests/distributed/test_lora.py"
ADAPTERS = (
    Mutant(
        "the gradient of a whole B is one rank's part of it",
        "trainer/transforms/lora.py",
        "module.lora_b.to_local(grad_placements=[Partial()])",
        "module.lora_b.to_local()",
        f"{_LORA}::test_layouts_train_the_same_adapters",
    ),
    Mutant(
        "adapters are merged without their factor",
        "trainer/transforms/lora.py",
        "settings.scale * (b.to(wide) @ a.to(wide))",
        "(b.to(wide) @ a.to(wide))",
        f"{_LORA}::test_adapters_train_here_as_in_peft",
    ),
    Mutant(
        "a run that resumes leaves the frozen weights at their initial values",
        "trainer/checkpoint/checkpointer.py",
        "if initial is not None and (step == 0 or adapts):",
        "if initial is not None and step == 0:",
        f"{_LORA}::test_frozen_weights_are_there_after_a_resume",
    ),
)
