"""Table of mistakes in linear attention, latent attention and the families that have them."""

from tests.mutants.mutant import Mutant

_CP = "longshard/context"
_LINEAR, _LATENT = "tests/distributed/test_linear_attention.py", "tests/distributed/test_latent_attention.py"
_FAMILIES = "tests/distributed/test_families.py"
_RANDOM = f"{_LINEAR}::test_random_layouts_and_documents"
_SCANS = "tests/distributed/test_transformers_scans.py"
_BITS = "tests/unit/test_thread_linear.py::test_deterministic_ranks_have_the_bits_of_one_process"
_KERNELS = "tests/unit/test_linear_kernels.py"
_INTERPRETED = f"{_KERNELS}::test_kernels_are_the_recurrence"
_PACKED = "tests/distributed/test_hybrid_documents.py::test_packed_documents_are_computed_alone[qwen3_5-3]"
_IMAGES = "tests/unit/test_text_and_images.py::test_the_model_of_text_is_read_and_written_back[qwen3_5_moe-True]"
_METHODS = f"{_LATENT}::test_every_method_layout_and_mask_equals_one_process"

HYBRID = (
    Mutant(
        "the backward folds maps that are not transposed",
        f"{_CP}/execution/linear_states.py",
        "(transition.mT if reverse else transition) @ state",
        "transition @ state",
        f"{_RANDOM}[gathered-4-0]",
    ),
    Mutant(
        "a state in turn skips the last block",
        f"{_CP}/linear_scan.py",
        "range(last + len(blocks) - 1)",
        "range(last + len(blocks) - 2)",
        f"{_RANDOM}[in_turn-4-0]",
    ),
    Mutant(
        "states in turn are found in the order of the scan",
        f"{_CP}/linear_scan.py",
        "sorted(states, reverse=reverse)",
        "sorted(states)",
        f"{_RANDOM}[in_turn-4-0]",
    ),
    Mutant(
        "maps are always gathered",
        f"{_CP}/linear_scan.py",
        "return fragments.length * map_bytes <= GATHERED_BYTES",
        "return True",
        f"{_LINEAR}::test_maps_are_gathered_while_they_are_small",
    ),
    Mutant(
        "ranks cut the sequence into chunks of their own, with deterministic algorithms",
        f"{_CP}/linear_scan.py",
        "(start // size * size, stop if stop == layout.length else stop // size * size)",
        "(start, stop)",
        f"{_BITS}[delta-head_tail-torch.float32]",
    ),
    Mutant(
        "chunks are in runs with deterministic algorithms",
        f"{_CP}/linear_pass.py",
        "longest <= most or torch.are_deterministic_algorithms_enabled()",
        "longest <= most",
        f"{_BITS}[delta-head_tail-torch.float32]",
    ),
    Mutant(
        "states in order come from the rank before the last fragment",
        f"{_CP}/linear_scan.py",
        "self._rank(fragment, -self._step)",
        "self._rank(fragment, -1)",
        f"{_BITS}[delta-head_tail-torch.float32]",
    ),
    Mutant(
        "runs begin with the state before the fragment",
        f"{_CP}/execution/linear_states.py",
        "        state = changed(state, change, reverse=reverse)\n    return",
        "        _ = changed(state, change, reverse=reverse)\n    return",
        f"{_LINEAR}::test_chunks_are_the_recurrence",
    ),
    Mutant(
        "pairs of neighbouring blocks are left out",
        f"{_CP}/execution/linear_pairs.py",
        "range(1, (x.shape[-2] // BLOCK).bit_length())]",
        "range(1, (x.shape[-2] // BLOCK).bit_length() - 1)]",
        f"{_LINEAR}::test_chunks_are_the_recurrence",
    ),
    Mutant(
        "first halves fade from the first token",
        f"{_CP}/execution/linear_pairs.py",
        "reference = second[..., :1, :]",
        "reference = second[..., -1:, :]",
        f"{_LINEAR}::test_strong_decays_neither_overflow_nor_divide",
    ),
    Mutant(
        "the last run goes on when it has ended",
        f"{_CP}/execution/linear_chunks.py",
        "torch.cat((new, state[:, :, ended:]), 2)",
        "torch.cat((new, new[:, :, -1:]), 2)",
        f"{_LINEAR}::test_chunks_are_the_recurrence",
    ),
    Mutant(
        "a state goes on into the next document",
        f"{_CP}/execution/linear_chunks.py",
        "self.grown = _masked(x.decay.exp(), begins)",
        "self.grown = x.decay.exp()",
        f"{_LINEAR}::test_chunks_are_the_recurrence",
    ),
    Mutant(
        "the entry state is lost in the backward",
        f"{_CP}/linear_pass.py",
        "self._chunks.states(KnownStates(entries), self._maps_if_runs())",
        "self._chunks.states(KnownStates(torch.zeros_like(entries)), self._maps_if_runs())",
        f"{_RANDOM}[gathered-4-0]",
    ),
    Mutant(
        "kernels run on through the start of a document",
        f"{_CP}/execution/linear_kernels.py",
        "decay = decay.masked_fill(begins, RESET)",
        "decay = decay",
        _INTERPRETED,
    ),
    Mutant(
        "kernels take the transition of a state of zeros",
        f"{_CP}/execution/linear_kernels.py",
        "state[..., v_dim:] = torch.eye(k_dim, dtype=state.dtype, device=state.device)",
        "pass",
        _INTERPRETED,
    ),
    Mutant(
        "kernels give the gradients of one sequence to another",
        f"{_CP}/execution/linear_kernels.py",
        "group_rows.unflatten(0, (-1, len(numbers))).unbind(1)",
        "group_rows.unflatten(0, (len(numbers), -1)).unbind(0)",
        _INTERPRETED,
    ),
    Mutant(
        "kernels leave out what the states behind a fragment give back",
        f"{_CP}/execution/linear_kernels.py",
        "(dout, self._group_states(exits, numbers))",
        "(dout, torch.zeros_like(results[1]))",
        _INTERPRETED,
    ),
    Mutant(
        "kernels run with deterministic algorithms",
        f"{_CP}/planning/capabilities.py",
        "key_dim <= 256 and not deterministic",
        "key_dim <= 256",
        f"{_KERNELS}::test_they_run_on_gpus_in_half_precision",
    ),
    Mutant(
        "gradients of the rotated part of a latent are those of one head",
        f"{_CP}/execution/latent.py",
        "dk[..., unrotated:].sum(1)",
        "dk[:, 0, :, unrotated:]",
        f"{_METHODS}[3-ring]",
    ),
    Mutant(
        "latents of all heads are expanded by the first ones",
        f"{_CP}/execution/latent.py",
        "k, v = expanded(latent, self._up[heads], self._key_dim)",
        "k, v = expanded(latent, self._up[: heads.stop - heads.start], self._key_dim)",
        f"{_LATENT}::test_heads_are_expanded_in_groups",
    ),
    Mutant(
        "the gradient of what expands is that of the last stage",
        f"{_CP}/execution/latent.py",
        "self.gradient[heads] += (",
        "self.gradient[heads] = (",
        f"{_METHODS}[3-ring]",
    ),
    Mutant(
        "keys and values are sent beside latents",
        f"{_CP}/execution/stages.py",
        "return 2 if v.shape[3] else 1, *k.shape[:2], k.shape[3]",
        "return 2, *k.shape[:2], k.shape[3]",
        f"{_LATENT}::test_bytes_are_those_of_latents",
    ),
    Mutant(
        "values that are filled up are not cut",
        f"{_CP}/execution/latent.py",
        "dv), -1)[..., : up.shape[1]]",
        "dv), -1)[..., -up.shape[1] :]",
        f"{_METHODS}[3-ring]",
    ),
    Mutant(
        "gathered latents have the gradient of one rank's heads",
        "trainer/parallel/tensor_parallel.py",
        "GATHERED = Distributed(before=_gathered, after=_used_in_part)",
        "GATHERED = Distributed(before=_gathered, after=_own_part)",
        f"{_FAMILIES}::test_a_layout_equals_one_process[deepseek_v3-tp2]",
    ),
    Mutant(
        "B and C have the gradient of one rank's heads",
        "trainer/parallel/tensor_parallel.py",
        "return x.to_local(grad_placements=[Partial()])",
        "return x.to_local()",
        f"{_FAMILIES}::test_a_layout_equals_one_process[granitemoehybrid-tp2]",
    ),
    Mutant(
        "YaRN's factor of scores is left out",
        "trainer/families/decoder_args.py",
        "(self.rope_scaling.score_factor if stretched else 1.0)",
        "1.0",
        f"{_FAMILIES}::test_logits_are_those_of_transformers[deepseek_v3]",
    ),
    Mutant(
        "decays are rounded to bfloat16 by FSDP",
        "trainer/models/parallelize.py",
        "exact = [module for module in model.modules() if isinstance(module, Decay)]",
        "exact = []",
        f"{_FAMILIES}::test_decays_are_in_float32_beside_bfloat16[kimi_linear]",
    ),
    Mutant(
        "what fills a prompt up changes its state",
        "lct_inference/generation_cache.py",
        "real = self._rows < self.lengths[:, None]",
        "real = self._rows < 1 + 10**6 * self.lengths[:, None]",
        "tests/distributed/test_generation.py::test_context_parallel_ranks_write_the_same",
    ),
    Mutant(
        "a scan of transformers knows no documents",
        "longshard/integrations/scans.py",
        "if all(len(begins) <= 1 for begins in starts):",
        "if starts:",
        f"{_SCANS}::test_scans_equal_one_process[Qwen3Next]",
    ),
    Mutant(
        "a bound layer may call its convolution itself",
        "longshard/integrations/inspection.py",
        "(module in bound and isinstance(module, conv._ConvNd))",
        "False",
        f"{_SCANS}::test_what_a_scan_cannot_follow_is_refused",
    ),
    Mutant(
        "a scan of transformers takes a cache",
        "longshard/integrations/scans.py",
        "or any(map(arguments.get, _ASKED)):",
        "or False:",
        f"{_SCANS}::test_what_a_scan_cannot_follow_is_refused",
    ),
    Mutant(
        "the inputs of beta and of the decays are exchanged where each has a matrix",
        "trainer/models/linear_attention.py",
        "self.in_z, self.in_beta, self.in_decay",
        "self.in_z, self.in_decay, self.in_beta",
        f"{_FAMILIES}::test_logits_are_those_of_transformers[qwen3_5]",
    ),
    Mutant(
        "short convolutions reach into the document before",
        "trainer/models/linear_attention.py",
        "self.inner_convolution.run(torch.cat([*parts], -1), taps, **where)",
        "self.inner_convolution.run(torch.cat([*parts], -1), taps, **where | {'positions': None})",
        _PACKED,
    ),
    Mutant(
        "states of Gated DeltaNet go on into the next document",
        "trainer/models/linear_attention.py",
        'Tokens(q, k, v, log_decay, b.sigmoid(), where["positions"], args.key_dim**-0.5)',
        "Tokens(q, k, v, log_decay, b.sigmoid(), None, args.key_dim**-0.5)",
        _PACKED,
    ),
    Mutant(
        "experts in one tensor are looked for in a tensor each",
        "trainer/hugging_face/pairs.py",
        "other if (other := hf.other_form) and other.name in names else hf",
        "hf",
        _IMAGES,
    ),
    Mutant(
        "the part that reads images is lost by an export",
        "trainer/checkpoint/export.py",
        "if name.startswith(LEFT_ASIDE)",
        "if name.startswith('visual.')",
        _IMAGES,
    ),
    Mutant(
        "functions stay bound outside of a context",
        "longshard/integrations/scans.py",
        "if not is_intercepted(x):",
        "if False:",
        f"{_SCANS}::test_outside_of_a_context_nothing_changes",
    ),
)
