"""Table of mistakes in sparse attention: the choice of keys, its exchange, and the loss of the indexer."""

from tests.mutants.mutant import Mutant

_ROWS = "longshard/context/execution/sparse_rows.py"
_OPERATOR = "longshard/context/sparse_attention.py"
_MODULE = "trainer/models/sparse_attention.py"
_TESTS = "tests/distributed/test_sparse_attention.py"
_MODELS = "tests/distributed/test_sparse_models.py"
_LAYOUTS = f"{_TESTS}::test_every_layout_and_mask_equals_the_definition[1073741824-3]"
_LEARNING = f"{_MODELS}::test_an_indexer_learns_which_keys_attention_reads"
_THEIRS = "tests/distributed/test_families.py::test_gradients_and_a_step_are_those_of_transformers"

SPARSE = (
    Mutant(
        "of equal scores the later keys count",
        _ROWS,
        "above | (equal & (equal.cumsum(-1) <= left))",
        "above | (equal & (equal.flip(-1).cumsum(-1).flip(-1) <= left))",
        f"{_TESTS}::test_of_equal_scores_the_earlier_keys_count",
    ),
    Mutant(
        "the choice sees tokens of earlier documents",
        _ROWS,
        "return (places >= start) & (places < stop)",
        "return (places >= 0) & (places < stop)",
        _LAYOUTS,
    ),
    Mutant(
        "tiles begin at the first visible key rounded up",
        _ROWS,
        "first = int(limits[..., 0].min()) // width * width",
        "first = -(-int(limits[..., 0].min()) // width) * width",
        _LAYOUTS,
    ),
    Mutant(
        "index scores keep negative products",
        _ROWS,
        "by_head = products.relu_().unflatten(1, queries.shape[1:3])",
        "by_head = products.unflatten(1, queries.shape[1:3])",
        _LAYOUTS,
    ),
    Mutant(
        "gradients of rows stay on the rank that attends to them",
        _OPERATOR,
        "return returned_rows(gradient, *self._wanted, 1)",
        "return gradient.index_select(1, torch.from_numpy(self.live.layout.indices(self.live.rank)))",
        _LAYOUTS,
    ),
    Mutant(
        "a chunk forgets the gradients of later chunks",
        _OPERATOR,
        "own = own + held[1].transpose(0, 1)",
        "own = own + 0",
        f"{_TESTS}::test_a_sequence_in_chunks_equals_the_definition",
    ),
    Mutant(
        "rows that a query has not chosen have a gradient",
        _ROWS,
        "dproducts.masked_fill_(self._products <= 0, 0)",
        "dproducts.masked_fill_(self._products < 0, 0)",
        _LAYOUTS,
    ),
    Mutant(
        "the loss of an indexer compares with one head",
        _ROWS,
        "self._target = attended.weights.mean(1)",
        "self._target = attended.weights[:, 0]",
        _LAYOUTS,
    ),
    Mutant(
        "an indexer learns to avoid what attention reads",
        _ROWS,
        "dscores = (shares - self._target) * dloss.unsqueeze(-1)",
        "dscores = (self._target - shares) * dloss.unsqueeze(-1)",
        _LEARNING,
    ),
    Mutant(
        "the loss of an indexer reaches the layers before it",
        _MODULE,
        "index = self.indexer(inputs.x.detach(), inputs.queried.detach(), inputs.freqs_cis)",
        "index = self.indexer(inputs.x, inputs.queried, inputs.freqs_cis)",
        f"{_THEIRS}[deepseek_v32]",
    ),
    Mutant(
        "each tensor-parallel rank adds the whole loss of an indexer",
        _MODULE,
        "share = q.shape[1] / self.args.n_heads",
        "share = 1.0",
        f"{_MODELS}::test_a_layout_equals_one_process",
    ),
    Mutant(
        "index heads rotate adjacent pairs in DeepSeek-V3.2, too",
        _MODULE,
        "rotate = apply_rope if self.args.adjacent_pairs else apply_rope_to_halves",
        "rotate = apply_rope",
        "tests/distributed/test_families.py::test_logits_are_those_of_transformers[deepseek_v32]",
    ),
    Mutant(
        "padding teaches an indexer",
        _MODULE,
        "if inputs.positions is not None:",
        "if inputs.positions is None:",
        f"{_MODELS}::test_padding_teaches_an_indexer_nothing",
    ),
    Mutant(
        "an index score that is not a number is hidden",
        _ROWS,
        "best_places.masked_fill((best == -torch.inf) | broken, -1)",
        "best_places.masked_fill(best == -torch.inf, -1)",
        f"{_TESTS}::test_a_key_that_is_no_number_is_not_hidden",
    ),
    Mutant(
        "the warm-up begins when one module is fixed",
        "trainer/job/sparse_attention.py",
        'all(is_fixed(name) == (".indexer." not in name) for name in names)',
        "any(map(is_fixed, names))",
        f"{_MODELS}::test_only_the_groups_of_the_warm_up_make_attention_dense",
    ),
    Mutant(
        "generation chooses among the tokens of its own rank",
        "lct_inference/generation_cache.py",
        'all_reduce(whole, self._cp, "max")',
        "whole = whole + 0",
        "tests/distributed/test_generation.py::test_context_parallel_ranks_write_the_same",
    ),
)
