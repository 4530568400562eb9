"""Table of mistakes in the kinds of layers and in the parts that some families have."""

from tests.mutants.mutant import Mutant

_HERE, _WEIGHTS = "tests/distributed/test_families.py", "tests/unit/test_families.py"
_LOGITS, _LAYOUTS = f"{_HERE}::test_logits_are_those_of_transformers", f"{_HERE}::test_a_layout_equals_one_process"
_TYPES = "tests/unit/test_hugging_face_types.py"
_THERE_AND_BACK = f"{_WEIGHTS}::test_a_model_goes_there_and_back_bit_for_bit"

FAMILIES = (
    Mutant(
        "the mean square of a norm over all heads is that of a rank's heads",
        "trainer/models/norms.py",
        "wide.square().mean(-1, keepdim=True) + self.eps",
        "DTensor.from_local(wide.to_local().square().mean(-1, keepdim=True), x.device_mesh) + self.eps",
        f"{_LAYOUTS}[olmo3-tp2]",
    ),
    Mutant(
        "layers with a window have the frequencies of the others",
        "trainer/models/decoder.py",
        "(self.get_buffer(_own(theta)), None) for theta",
        "(self.frequencies, None) for theta",
        f"{_LOGITS}[gemma3]",
    ),
    Mutant(
        "the backward of a soft-cap has the slope of the scores without it",
        "trainer/distributed/context_parallel/execution/kernels/cpu.py",
        "ds = ds * (1 - (scores.clamp(min=-self._softcap) / self._softcap).square())",
        "ds = ds * 1.0",
        "tests/unit/test_kernels.py::test_a_soft_cap_is_that_of_autograd",
    ),
    Mutant(
        "the loss in chunks has the gradient of logits without a soft-cap",
        "trainer/models/chunked_loss.py",
        "return softcap * shares, 1 - shares.square()",
        "return softcap * shares, torch.ones_like(shares)",
        "tests/unit/test_chunked_loss.py::test_capped_logits_have_the_loss_and_gradients_of_autograd",
    ),
    Mutant(
        "the channels that are not rotated are multiplied by YaRN's factor",
        "trainer/models/rotary.py",
        "cosines[..., :rotated].mul_(magnitude)",
        "cosines.mul_(magnitude)",
        f"{_LOGITS}[glm4_moe-plain]",
    ),
    Mutant(
        "LongRoPE has the short factors for any length",
        "trainer/models/rotary.py",
        "if longest > scaling.original_max_seq_len else scaling.short_factors",
        "if longest < 0 else scaling.short_factors",
        "tests/unit/test_rotary.py::test_longrope_is_that_of_transformers",
    ),
    Mutant(
        "a part of a matrix in float8 has the scales of the first blocks",
        "trainer/hugging_face/reader.py",
        "firsts = [start // FLOAT8_BLOCK for start in offsets[-2:]]",
        "firsts = [0 * start for start in offsets[-2:]]",
        "tests/unit/test_float8_weights.py",
    ),
    Mutant(
        "the blocks of float8 begin where the part begins",
        "trainer/hugging_face/reader.py",
        "torch.arange(offsets[dim], offsets[dim] + part.shape[dim])",
        "offsets[dim] // FLOAT8_BLOCK * FLOAT8_BLOCK + torch.arange(part.shape[dim])",
        "tests/unit/test_float8_weights.py",
    ),
    Mutant(
        "each fused matrix begins with the first row",
        "trainer/families/decoder_tensors.py",
        '"first_row": sum(group[each] for each in before)',
        '"first_row": 0',
        f"{_WEIGHTS}::test_parts_of_fused_matrices_are_read",
    ),
    Mutant(
        "a group of experts counts as much as its best one",
        "trainer/models/moe.py",
        "by_group.topk(2, dim=-1)",
        "by_group.topk(1, dim=-1)",
        f"{_LOGITS}[glm4_moe]",
    ),
    Mutant(
        "a run that has saved nothing is exported as it was before training",
        "trainer/commands/finished_run.py",
        "    start = config.checkpoint.initial_load_path\n    there = ",
        "    if start := config.checkpoint.initial_load_path:\n        return start\n    there = ",
        "tests/unit/test_finished_run.py",
    ),
    Mutant(
        "a step is read with the configuration of the folder's last run",
        "trainer/commands/finished_run.py",
        "content = None if step is None else saved_configuration(folder, step)",
        "content = None",
        "tests/unit/test_finished_run.py",
    ),
    Mutant(
        "a command that reads imports what the folder names",
        "trainer/config/loader.py",
        "if new and Path(file).name == RUN_FILE:",
        "if new and Path(file).name == RUN_FILE and not reading:",
        "tests/unit/test_finished_run.py",
    ),
    Mutant(
        "adapters are added in the type of the weights",
        "trainer/transforms/lora.py",
        "return weight.to(wide) + settings.scale * (b.to(wide) @ a.to(wide))",
        "return (weight.to(wide) + settings.scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)",
        _TYPES,
    ),
    Mutant(
        "the tokenizer of the first folder is exported with a run that had another one",
        "trainer/checkpoint/text_files.py",
        "(source in file.parents or _is_tokenizer(source, tokenizer)) else None",
        "True else None",
        "tests/unit/test_exported_tokenizer.py",
    ),
    Mutant(
        "a piece of text that is a token is merged from its letters",
        "trainer/data/tokenizers/as_json.py",
        "yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))",
        "yield from known[:1]",
        "tests/unit/test_exported_tokenizer.py",
    ),
    Mutant(
        "a single file beside an index is overlooked",
        "trainer/hugging_face/files.py",
        "if (folder / SINGLE).is_file() and SINGLE not in files.values():",
        "if False:",
        "tests/unit/test_hugging_face.py",
    ),
    Mutant(
        "a tied tensor under its second name alone is no tensor of the model",
        "trainer/hugging_face/reader.py",
        "if name in self._stored and first not in self._stored:",
        "if False:",
        "tests/unit/test_hugging_face.py",
    ),
    Mutant(
        "a model that takes the likeliest token draws",
        "trainer/commands/sampling_defaults.py",
        'if content.get("do_sample") is False:',
        "if False:",
        "tests/unit/test_sampling_defaults.py",
    ),
    Mutant(
        "a text that grows beyond the original length keeps the short factors of LongRoPE",
        "trainer/models/decoder.py",
        "return scaling.original_max_seq_len if length <= scaling.original_max_seq_len else math.inf",
        "return math.inf",
        "tests/unit/test_longrope_lengths.py",
    ),
    Mutant(
        "the bias that chooses is rounded with the weights",
        "trainer/checkpoint/export.py",
        'if not isinstance(ours, torch.nn.Parameter) or parts & {*there.split(".")}:',
        'if parts & {*there.split(".")}:',
        _TYPES,
    ),
    Mutant(
        "what is exported goes through the type of training",
        "trainer/checkpoint/export.py",
        "dtype=saved.get(name))",
        "dtype=torch.bfloat16)",
        _TYPES,
    ),
    Mutant(
        "tensors of the source lose the type that is wider than the others'",
        "trainer/hugging_face/reader.py",
        "if BYTES[stored.dtype] > usual}",
        "if BYTES[stored.dtype] > usual + 4}",
        _TYPES,
    ),
    Mutant(
        "the bias that chooses is no weight of Hugging Face",
        "trainer/families/decoder_tensors.py",
        "return None if there is None else HFTensor(prefix + there)",
        "return None",
        f"{_THERE_AND_BACK}[minimax_m2]",
    ),
)
