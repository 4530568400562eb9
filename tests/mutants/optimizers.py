"""Table of mistakes in Muon, in who owns a matrix, and in rates by name."""

from tests.mutants.mutant import Mutant

_MUON, _MATRICES = "tests/distributed/test_muon.py", "tests/unit/test_matrices.py"
_LAYOUTS = f"{_MUON}::test_every_layout_updates_as_one_process"
_TORCH = f"{_MUON}::test_one_process_updates_as_pytorchs_muon"
_COUNTS = f"{_MUON}::test_each_product_runs_once_and_sends_what_it_must"
_Z_LOSS = "tests/unit/test_chunked_loss.py::test_gradients_of_the_z_loss_are_those_of_autograd"
_FURTHER = "tests/unit/test_multi_token.py"
_SEES = f"{_FURTHER}::test_a_layer_sees_the_next_token_and_the_hidden_states_before_it"
_SUMS = f"{_FURTHER}::test_gradients_are_those_of_the_sum_and_the_loss_is_the_models"
_CLIP = "tests/distributed/test_qk_clip.py"
_CLIPPED = f"{_CLIP}::test_no_logit_stays_above_the_bound"
_KINDS = f"{_MATRICES}::test_each_parameter_of_a_family_is_in_one_group"

MUON = (
    Mutant(
        "a gradient of float64 meets a momentum of float32",
        "trainer/components/muon.py",
        "gradient.to(both).lerp(momentum.to(both), self._settings.momentum)",
        "gradient.lerp(momentum, self._settings.momentum)",
        "tests/distributed/test_stored_types.py::test_each_optimizer_takes_each_pair_of_types",
    ),
    Mutant(
        "tall matrices are not turned",
        "trainer/components/muon.py",
        "tall = x.shape[1] > x.shape[2]",
        "tall = False",
        _TORCH,
    ),
    Mutant(
        "nesterov is ignored",
        "trainer/components/muon.py",
        "if not self._settings.nesterov:",
        "if True:",
        _TORCH,
    ),
    Mutant(
        "the rate is that of the other rule",
        "trainer/components/muon.py",
        'if rule == "original":',
        'if rule != "original":',
        _TORCH,
    ),
    Mutant(
        "weights decay by the whole rate, not by rate times decay",
        "trainer/components/muon.py",
        '1 - rate * update.group["weight_decay"]',
        "1 - rate",
        _TORCH,
    ),
    Mutant(
        "an infinite gradient reaches the momentum",
        "trainer/components/muon.py",
        "torch.where(share > 0, update.gradient, 0)",
        "update.gradient",
        f"{_MUON}::test_steps_that_are_left_out_change_nothing",
    ),
    Mutant(
        "the momentum of a step that is left out decays",
        "trainer/components/muon.py",
        "weight = (weight * share).to(moved.dtype)",
        "pass",
        f"{_MUON}::test_steps_that_are_left_out_change_nothing",
    ),
    Mutant(
        "weights have the random bits of the shard's first row",
        "trainer/components/muon.py",
        "first_row=rows[0], bits_above=0",
        "first_row=0, bits_above=0",
        f"{_MUON}::test_what_is_stored_in_bfloat16_is_rounded_alike_on_every_layout",
    ),
    Mutant(
        "FSDP cuts before tensor parallelism",
        "trainer/parallel/ownership.py",
        'hasattr(cut[0], "split_factor"))',
        'not hasattr(cut[0], "split_factor"))',
        _LAYOUTS,
    ),
    Mutant(
        "results go to one of the copies",
        "trainer/parallel/ownership.py",
        "for rank in piece.ranks:\n                    sent[rank] += blocks",
        "for rank in piece.ranks[:1]:\n                    sent[rank] += blocks",
        _LAYOUTS,
    ),
    Mutant(
        "every matrix belongs to the first rank",
        "trainer/parallel/ownership.py",
        "sharing[turn_of[sharing] % len(sharing)]",
        "sharing[0]",
        _COUNTS,
    ),
    Mutant(
        "a shard's copy is sent that is not the nearest",
        "trainer/parallel/ownership.py",
        "key=lambda rank: abs(rank - self.owner))",
        "key=lambda rank: -abs(rank - self.owner))",
        _COUNTS,
    ),
    Mutant(
        "gates and their inputs are matrices",
        "trainer/models/matrices.py",
        "if isinstance(module, LinearAttention):",
        "if isinstance(module, LinearAttention) and per_head:",
        _KINDS,
    ),
    Mutant(
        "the output is a matrix",
        "trainer/models/matrices.py",
        "names = () if module is output else _names(module)",
        "names = _names(module)",
        _KINDS,
    ),
    Mutant(
        "gate and up projection of an expert are one matrix",
        "trainer/models/matrices.py",
        "hidden = module.w13.shape[1] // 2",
        "hidden = module.w13.shape[1]",
        f"{_MATRICES}::test_a_matrix_is_divided_by_what_its_rows_are",
    ),
    Mutant(
        "heads are apart where nobody asked",
        "trainer/models/matrices.py",
        "    if per_head:\n        return",
        "    if True:\n        return",
        f"{_MATRICES}::test_a_matrix_is_divided_by_what_its_rows_are",
    ),
    Mutant(
        "a rule's rate replaces the peak",
        "trainer/components/optimizer.py",
        'changed["lr"] *= _or(own.lr_factor, 1.0)',
        'changed["lr"] = _or(own.lr_factor, 1.0)',
        f"{_MUON}::test_rates_and_decays_by_name",
    ),
    Mutant(
        "the z-loss has the gradient of the log-sum-exp, not of its square, in chunks",
        "trainer/models/chunked_loss_functions.py",
        "(1 + 2 * z_loss * lse)[:, None]",
        "(1 + z_loss)",
        _Z_LOSS,
    ),
    Mutant(
        "the z-loss forgets the label's logit",
        "trainer/models/chunked_loss_functions.py",
        "at_label.exp() * square_factor - 1",
        "at_label.expm1()",
        _Z_LOSS,
    ),
    Mutant(
        "the z-loss counts tokens without a label",
        "trainer/components/loss.py",
        ".masked_fill(labels == IGNORE_INDEX, 0)\n        losses",
        "\n        losses",
        _Z_LOSS,
    ),
    Mutant(
        "states of another optimizer are loaded",
        "trainer/stores/folder.py",
        "state.optimizer not in known",
        'state.optimizer in ("none",)',
        f"{_MUON}::test_states_of_another_optimizer_are_refused",
    ),
    Mutant(
        "a schedule that starts again counts from the first step",
        "trainer/components/lr_scheduler.py",
        "max(step - start, 0)",
        "step",
        f"{_MUON}::test_a_finished_run_goes_on_in_a_new_schedule",
    ),
)

FURTHER = (
    Mutant(
        "targets of further tokens cross the borders of documents",
        "trainer/tasks/further_tokens.py",
        "next_labels.append(following.masked_fill(outside, IGNORE_INDEX))",
        "next_labels.append(following)",
        f"{_FURTHER}::test_targets_are_further_labels_of_the_same_document",
    ),
    Mutant(
        "layers for further tokens see the token again",
        "trainer/tasks/further_tokens.py",
        "_shifted(tokens, distance, 0)",
        "tokens",
        f"{_FURTHER}::test_targets_are_further_labels_of_the_same_document",
    ),
    Mutant(
        "hidden states come before embeddings",
        "trainer/models/decoder.py",
        "torch.cat([next_embedding, hidden[-1]], -1)",
        "torch.cat([hidden[-1], next_embedding], -1)",
        _SEES,
    ),
    Mutant(
        "each layer for further tokens follows the model",
        "trainer/models/decoder.py",
        "torch.cat([next_embedding, hidden[-1]], -1)",
        "torch.cat([next_embedding, hidden[0]], -1)",
        _SEES,
    ),
    Mutant(
        "further tokens count as much as the next ones",
        "trainer/tasks/further_tokens.py",
        "if set(factors) == {1.0}:",
        "if True:",
        _SUMS,
    ),
    Mutant(
        "further tokens count whole in the gradient of the output",
        "trainer/models/chunked_loss.py",
        "_add_product(self.weight, grad_logits.T, hidden, factor)",
        "_add_product(self.weight, grad_logits.T, hidden, 1.0)",
        _SUMS,
    ),
    Mutant(
        "further tokens count whole in the gradients of hidden states",
        "trainer/models/chunked_loss.py",
        "rows.mul_(factor)",
        "rows.mul_(1.0)",
        _SUMS,
    ),
)

QK_CLIP = (
    Mutant(
        "rotated queries get the root of the factor",
        "trainer/components/qk_clip.py",
        "(latent.rope_dim, factors)",
        "(latent.rope_dim, root)",
        _CLIPPED,
    ),
    Mutant(
        "queries do not make up for the keys of their group",
        "trainer/components/qk_clip.py",
        "(groups / key_factors[:, None]).flatten()",
        "groups.sqrt().flatten()",
        _CLIPPED,
    ),
    Mutant(
        "ranks clip by what they have seen themselves",
        "trainer/components/qk_clip.py",
        'all_reduce(self._seen.clone(), self._dims["dp_cp"], "max")',
        "self._seen.clone()",
        f"{_CLIP}::test_a_layout_clips_as_one_process",
    ),
    Mutant(
        "a step that is left out clips",
        "trainer/components/qk_clip.py",
        "clips & (left_out == 0)",
        "clips",
        f"{_CLIP}::test_a_step_that_is_left_out_clips_nothing",
    ),
    Mutant(
        "a step remembers the logits of the one before",
        "trainer/components/qk_clip.py",
        "self._seen.fill_(-torch.inf)",
        "self._seen",
        f"{_CLIP}::test_logits_are_those_of_the_step",
    ),
)

_EARLY, _EARLY_UPDATE = "tests/distributed/test_early_update.py", "trainer/components/early_update.py"
_SAME = f"{_EARLY}::test_the_update_is_that_of_the_ordinary_step"
_FAILS = f"{_EARLY}::test_a_step_that_fails_in_its_middle_ends_the_run"
_BEFORE = f"{_EARLY}::test_the_last_layer_is_updated_before_the_backward_of_the_first_one"
_TWICE = f"{_EARLY}::test_a_unit_that_runs_twice_is_updated_once_its_gradients_are_whole"
EARLY_UPDATES = (
    Mutant(
        "the update begins with the first micro-batch",
        "trainer/trainer.py",
        "if self.early is not None and ends:",
        "if self.early is not None and number == 0:",
        _SAME,
    ),
    Mutant(
        "the rest of the update does not wait for what runs",
        _EARLY_UPDATE,
        "            job.result()\n",
        "            pass\n",
        _FAILS,
    ),
    Mutant(
        "a parameter is updated twice",
        _EARLY_UPDATE,
        "            parameter.grad = None\n",
        "            pass\n",
        _SAME,
    ),
    Mutant(
        "a forward that recomputes counts",
        _EARLY_UPDATE,
        "self._counts = False  # from here on a forward recomputes",
        "pass",
        _SAME,
    ),
    Mutant(
        "a unit is updated after the first of its backwards",
        _EARLY_UPDATE,
        "if not self._calls[unit]:",
        "if True:",
        _TWICE,
    ),
    Mutant(
        "the worker does not wait for the copy of a gradient",
        _EARLY_UPDATE,
        "            event.synchronize()\n",
        "            pass\n",
        _BEFORE,
    ),
    Mutant(
        "units are updated after the backward",
        _EARLY_UPDATE,
        "if self._counts and torch.is_grad_enabled():",
        "if False:",
        _BEFORE,
    ),
    Mutant(
        "the worker knows the parameters of the first unit alone",
        _EARLY_UPDATE,
        "groups = self._optimizer.param_groups",
        "groups = self._part.param_groups",
        _SAME,
    ),
    Mutant(
        "a gradient changes after the update of its parameter",
        _EARLY_UPDATE,
        "if any(version_of(local_part(grad)) != self._versions[p] for p, grad in gradients.items()):",
        "if False:",
        _FAILS,
    ),
    Mutant(
        "a step follows one that has failed in its middle",
        _EARLY_UPDATE,
        "        if self._versions:\n",
        "        if False:\n",
        _FAILS,
    ),
    Mutant(
        "the thread of updates outlives the run",
        "trainer/trainer.py",
        "                self.early.close()\n",
        "                pass\n",
        _FAILS,
    ),
    Mutant(
        "a copy of the optimizer rounds by no key",
        "trainer/components/rounding.py",
        'super().__getstate__() | {"state_dtype": self.state_dtype, "_rounding": self._rounding}',
        'super().__getstate__() | {"state_dtype": self.state_dtype, "_rounding": Rounding({}, seed=0, stochastic=0)}',
        _SAME,
    ),
    Mutant(
        "a step that is not finite is said to have changed no weight",
        "trainer/components/step_outcome.py",
        "if self._updates_early else weights",
        "if False else weights",
        f"{_EARLY}::test_a_step_that_is_not_finite_ends_the_run_on_all_ranks",
    ),
    Mutant(
        "an early update counts beside the backward",
        "lct_planner/timing.py",
        'if early and part == "optimizer" else 0.0',
        "if False else 0.0",
        "tests/unit/test_planner_times.py::test_an_update_during_the_backward_counts_where_it_takes_longer",
    ),
    Mutant(
        "gradients may be clipped after the update has begun",
        "trainer/job/incompatible.py",
        "d.config.training.max_norm < math.inf",
        "False",
        "tests/unit/test_job.py",
    ),
)
