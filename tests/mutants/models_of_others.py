"""Table of mistakes in checks on models of others."""

from tests.mutants.mutant import Mutant

MODELS_OF_OTHERS = (
    Mutant(
        "a model may count its part from 0",
        "longshard/integrations/positions.py",
        "restarted = not is_global and bool(",
        "restarted = False and bool(",
        "tests/distributed/test_transformers.py",
    ),
    Mutant(
        "documents excuse any positions",
        "longshard/integrations/positions.py",
        "self.flags |= _NOT_BY_DOCUMENT * (not is_by_document)",
        "self.flags |= 0",
        "tests/distributed/test_transformers.py",
    ),
    Mutant(
        "the window of a mask is forgotten",
        "longshard/integrations/calls.py",
        "    if not local_size:\n        return None",
        "    if local_size or not local_size:\n        return None",
        "tests/unit/test_thread_transformers.py::test_every_causal_model_with_windows",
    ),
    Mutant(
        "chunks are taken for a window",
        "longshard/integrations/calls.py",
        "local_size if _is_window(mask_function, local_size) else -local_size",
        "local_size",
        "tests/unit/test_thread_transformers.py::test_the_form_of_a_mask_is_that_of_its_function",
    ),
    Mutant(
        "a window is left to the part of a rank",
        "longshard/integrations/inspection.py",
        'if implementation == "sdpa" and window and window < seq_len:',
        'if implementation == "sdpa" and window and window < 0 * seq_len:',
        "tests/unit/test_thread_transformers.py::test_every_causal_model_with_windows",
    ),
    Mutant(
        "token_dropout scales by the part of a rank",
        "longshard/integrations/inspection.py",
        'if getattr(module, "token_dropout", False):',
        'if getattr(module, "token_dropping", False):',
        "tests/unit/test_inspection.py",
    ),
    Mutant(
        "positions are watched until the ranks have compared them",
        "longshard/integrations/watch.py",
        "            self.has_news |= self.positions.see(x)",
        "            self.has_news and self.positions.see(x)",
        "tests/distributed/test_transformers.py",
    ),
    Mutant(
        "the first call of a rotary table by hand is not watched",
        "longshard/integrations/watch.py",
        "elif inspection.POSITIONS.search(type(root).__name__):",
        "elif False:",
        "tests/distributed/test_transformers.py",
    ),
    Mutant(
        "a mean over tokens is a mean",
        "longshard/integrations/interception.py",
        '("roll", "cumsum", "flip", "mean")',
        '("roll", "cumsum", "flip")',
        "tests/distributed/test_escapes.py",
    ),
    Mutant(
        "check_model compares the gradients of a rank's part",
        "scripts/check_model.py",
        'all_reduce(torch.zeros_like(p) if p.grad is None else p.grad.clone(), mesh, "sum")',
        "torch.zeros_like(p) if p.grad is None else p.grad.clone()",
        "tests/unit/test_thread_transformers.py::test_check_model_says_what_is_equal_and_what_differs",
    ),
    Mutant(
        "check_model finds everything equal",
        "scripts/check_model.py",
        '"equal" if error <= tolerance else "DIFFERS"',
        '"equal" if error <= 1e9 else "DIFFERS"',
        "tests/unit/test_thread_transformers.py::test_check_model_says_what_is_equal_and_what_differs",
    ),
)
