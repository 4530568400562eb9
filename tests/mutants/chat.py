"""Mistakes in conversations: labels and packing."""

from tests.mutants.mutant import Mutant

_CHAT, _FIT = "tests/unit/test_chat.py", "tests/unit/test_best_fit.py"

CHAT = (
    Mutant(
        "a token that is half prompt and half answer has a label",
        "trainer/data/chat.py",
        "(start <= starts) & (starts < stop)",
        "(start < stops) & (starts < stop)",
        f"{_CHAT}::test_a_token_across_the_border_has_no_label",
    ),
    Mutant(
        "the white space after an end token is learnt",
        "trainer/data/chat_template.py",
        "len(whole if ends_by_itself else whole.rstrip())",
        "len(whole)",
        f"{_CHAT}::test_both_ways_to_find_answers_agree",
    ),
    Mutant(
        "a conversation is packed that is one token too long",
        "trainer/data/best_fit.py",
        "(missing, 1)",
        "(missing + 1, 1)",
        f"{_FIT}::test_an_epoch_has_every_conversation_once_and_whole",
    ),
    Mutant(
        "an epoch ends while conversations wait",
        "trainer/data/best_fit.py",
        "if not self._waiting and self._place == len(self._items):",
        "if self._place == len(self._items):",
        f"{_FIT}::test_an_epoch_has_every_conversation_once_and_whole",
    ),
)
