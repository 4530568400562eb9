"""Mistakes in conversations, packing and mixtures."""

from tests.mutants.mutant import Mutant

_CHAT, _FIT = "tests/unit/test_chat.py", "tests/unit/test_best_fit.py"
_MIXTURE = "tests/unit/test_mixture.py"
_WHOLE = "tests/unit/test_packing_whole.py"
_ITERABLES = "tests/unit/test_data_iterables.py"

CHAT = (
    Mutant(
        "the position in an iterable is that behind the document that is read ahead",
        "trainer/data/sources/iterables.py",
        "            self._states[self._read] = self._state_before(self._read)\n",
        "",
        f"{_ITERABLES}::test_a_resumed_run_reads_the_rest_on_any_number_of_ranks",
    ),
    Mutant(
        "documents of an iterable that wait for their sequence are lost when it is resumed",
        "trainer/data/packing/whole.py",
        "min(next(iter(self._waiting), self._place), self._place - bool(self._whole_left))",
        "self._place",
        f"{_ITERABLES}::test_a_resumed_run_reads_the_rest_on_any_number_of_ranks",
    ),
    Mutant(
        "a token that is half prompt and half answer has a label",
        "trainer/data/tokenizers/encoders.py",
        "(start <= starts) & (starts < stop)",
        "(start < stops) & (starts < stop)",
        f"{_CHAT}::test_a_token_across_the_border_has_no_label",
    ),
    Mutant(
        "the white space after an end token is learnt",
        "trainer/data/tokenizers/chat_template.py",
        "len(whole if ends_by_itself else whole.rstrip())",
        "len(whole)",
        f"{_CHAT}::test_both_ways_to_find_answers_agree",
    ),
    Mutant(
        "tools in a string are spelled letter by letter",
        "trainer/data/sources/conversations.py",
        "json.loads(tools) if isinstance(tools, str) else tools",
        "list(tools)",
        "tests/unit/test_chat.py::test_tools_may_be_a_string_of_json",
    ),
    Mutant(
        "a tool call that a template leaves out is taught as silence",
        "trainer/data/tokenizers/chat_written.py",
        'for call in message.get("tool_calls") or ():\n            function, arguments',
        "for call in ():\n            function, arguments",
        "tests/unit/test_chat.py::test_a_message_that_the_template_leaves_out_is_refused",
    ),
    Mutant(
        "a short answer is found in an earlier message",
        "trainer/data/tokenizers/chat_written.py",
        "text.find(form, start)",
        "text.find(form)",
        "tests/unit/test_chat.py::test_a_message_that_the_template_leaves_out_is_refused",
    ),
    Mutant(
        "a text begins with a token that the tokenizer does not put there",
        "trainer/data/tokenizers/tokenizer_json.py",
        "return begin[0] if begin else None",
        'return begin[0] if begin else self._tokenizer.token_to_id("<|begin|>")',
        "tests/unit/test_tokenizer_formats.py::test_what_begins_and_ends_a_text",
    ),
    Mutant(
        "a text ends with one of the model's end tokens only",
        "trainer/commands/generate.py",
        "ends |= set(named) if isinstance(named, list) else {named}",
        "pass",
        "tests/unit/test_hugging_face.py::test_every_end_that_a_model_names_ends_a_text",
    ),
    Mutant(
        "a conversation is packed that is one token too long",
        "trainer/data/packing/whole.py",
        "(missing, 1)",
        "(missing + 1, 1)",
        f"{_FIT}::test_an_epoch_has_every_conversation_once_and_whole",
    ),
    Mutant(
        "an epoch ends while conversations wait",
        "trainer/data/packing/whole.py",
        "if not (self._waiting or self._whole_left) and self._place == len(self.items):",
        "if self._place == len(self.items):",
        f"{_FIT}::test_an_epoch_has_every_conversation_once_and_whole",
    ),
    Mutant(
        "the last label of a piece of a document is lost",
        "trainer/data/packing/whole.py",
        "labels[start : start + seq_len])",
        "np.append(labels[start : start + seq_len - 1], np.int32(IGNORE_INDEX)))",
        f"{_WHOLE}::test_each_token_of_each_document_is_trained_exactly_once_an_epoch",
    ),
    Mutant(
        "a resumed stream begins a document of several pieces again",
        "trainer/data/packing/whole.py",
        "waiting | self._whole_left << WINDOW",
        "waiting",
        f"{_WHOLE}::test_a_resume_between_the_pieces_of_a_document_needs_their_number",
    ),
    Mutant(
        "a resumed stream loses the pieces of a document whose rest was given before",
        "trainer/data/packing/whole.py",
        "if left and self._place - 1 not in self._waiting:",
        "if False:",
        f"{_WHOLE}::test_no_piece_is_lost_of_a_document_whose_rest_fills_up_a_sequence_before",
    ),
    Mutant(
        "every token of a conversation is learned",
        "trainer/data/packing/sequence.py",
        "if document.answers is None else",
        "if True else",
        "tests/unit/test_chat.py::test_labels_are_the_answers_and_their_ends",
    ),
    Mutant(
        "the answers of a document are those of another one",
        "trainer/data/token_files/reader.py",
        "start // pair.itemsize, stop // pair.itemsize)",
        "start, start + (stop - start) // pair.itemsize)",
        "tests/unit/test_token_cache.py::test_conversations_become_the_same_sequences_and_labels_bit_for_bit",
    ),
    Mutant(
        "the sources of a mixture begin again when a run resumes",
        "trainer/data/mixture.py",
        "part.restart(_part(state, name))",
        "part.restart({})",
        f"{_MIXTURE}::test_the_order_does_not_depend_on_degrees_and_a_resume_is_exact",
    ),
    Mutant(
        "sources have half of their shares, and the last one the rest",
        "trainer/data/mixture.py",
        "int(end * 2**64 / sum(parts))",
        "int(end * 2**63 / sum(parts))",
        f"{_MIXTURE}::test_each_source_has_its_share_at_any_time_in_the_whole_and_in_each_stream",
    ),
    Mutant(
        "the loss of a source is that of one data-parallel rank",
        "trainer/components/source_losses.py",
        'dims["dp"]).tolist()',
        'dims["pp"]).tolist()',
        "tests/distributed/test_mixture.py::test_a_layout_records_what_one_process_does",
    ),
    Mutant(
        "padding is counted on one rank",
        "trainer/tasks/language.py",
        'all_reduce(padding, self._dims["dp"]).item()',
        "padding.item()",
        "tests/distributed/test_packing.py::test_the_share_of_padding_is_that_of_all_ranks",
    ),
)
