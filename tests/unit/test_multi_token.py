"""Law: layers for further tokens see the right tokens, learn the right ones, and bring their weights from DeepSeek's.

On many ranks: tests/distributed/test_multi_token.py and the support matrix.
"""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.hf_families import MODELS, hf_decoder, in_double
from tests.unit.test_expert_hugging_face import read_here, whole_folder, write_here
from trainer.components.loss import token_losses
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data.packing import IGNORE_INDEX
from trainer.families.decoder_args import TransformerArgs
from trainer.families.registry import MODELS as FAMILIES
from trainer.families.registry import hf_config
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.job import resolve
from trainer.models.chunked_loss import Chunks, chunked_token_losses
from trainer.models.decoder import Transformer
from trainer.models.initialization import initialize
from trainer.models.model_spec import hf_model, model_spec
from trainer.parallel.parallel_dims import ParallelDims
from trainer.tasks.further_tokens import FurtherTokens, first_losses, further_targets

ARGS = TransformerArgs(
    dim=32, n_layers=2, mtp_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=40, max_seq_len=12
)
CPU = torch.device("cpu")


def further_tokens(layers: int = 2, weight: float = 0.5) -> FurtherTokens:
    dims = mock.MagicMock(spec=ParallelDims)
    dims.zeros = lambda *shape: torch.zeros(*shape, dtype=torch.float64)
    return FurtherTokens(layers, weight, dims)


def batch(rows: int, length: int, documents: int, *, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (rows, length + 1), generator=generator)
    ids = torch.randint(0, documents, (rows, length), generator=generator).sort(1).values
    labels = tokens[:, 1:].clone()
    labels[:, :-1][ids[:, 1:] != ids[:, :-1]] = IGNORE_INDEX
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX  # tokens that are not to be learned
    return {"tokens": tokens[:, :-1], "labels": labels, "document_ids": ids}


def model(args: TransformerArgs = ARGS) -> Transformer:
    with torch.device("meta"):
        made = Transformer(args).to(torch.float64)
    initialize(made, seed=3, device=CPU)
    return made


@pytest.mark.parametrize("documents", [1, 4])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_targets_are_further_labels_of_the_same_document(length: int, documents: int) -> None:
    tensors = batch(3, length, documents, seed=length)
    tensors |= further_targets(tensors["tokens"], tensors["labels"], tensors["document_ids"], 3)
    counted = 0
    for row in range(3):
        for i in range(length):
            for k in range(3):
                j, label = i + k + 1, int(tensors["next_labels"][row, i, k])
                within = j < length and tensors["document_ids"][row, j] == tensors["document_ids"][row, i]
                assert label == (int(tensors["labels"][row, j]) if within else IGNORE_INDEX)
                if within:
                    assert tensors["next_tokens"][row, i, k] == tensors["tokens"][row, j]
                counted += label != IGNORE_INDEX
    assert counted > 0 or length < 3


def by_hand(made: Transformer, tokens: torch.Tensor, next_tokens: torch.Tensor) -> list[torch.Tensor]:
    """The paper's formula (21) to (23), with each layer's block as a black box."""

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + made.args.norm_eps).sqrt() * weight

    h = made(tokens)
    states = [h]
    table = made._freqs_cis(tokens, None, None)[None]
    for k in range(made.args.mtp_layers):
        number = str(made.args.n_layers + k)
        layer, weights = made.layers[number], made.tok_embeddings.weight
        left = rms(weights[next_tokens[..., k]], layer.embedding_norm.weight) @ layer.projection.weight[:, :32].T
        right = rms(h, layer.hidden_norm.weight) @ layer.projection.weight[:, 32:].T
        block = super(type(layer), layer).forward
        h = rms(block(left + right, table), made.mtp_norms[number].weight)
        states.append(h)
    return states


def test_a_layer_sees_the_next_token_and_the_hidden_states_before_it() -> None:
    made, inputs = model(), batch(2, 12, 1, seed=1)
    with torch.no_grad():
        for name, x in made.named_parameters():
            if "norm" in name:
                nn.init.normal_(x, 1.0, 0.5)
    inputs |= further_targets(inputs["tokens"], inputs["labels"], inputs["document_ids"], 2)
    states = made(inputs["tokens"], next_tokens=inputs["next_tokens"]).chunk(3)
    for ours, theirs in zip(states, by_hand(made, inputs["tokens"], inputs["next_tokens"]), strict=True):
        assert (ours - theirs).norm() <= 1e-13 * theirs.norm()
    # Token i + k changes what the k-th layer has at i, and nothing before.
    changed = inputs["next_tokens"].clone()
    changed[:, 5, 1] += 1
    other = made(inputs["tokens"], next_tokens=changed % 40).chunk(3)
    assert torch.equal(other[0], states[0])
    assert torch.equal(other[1], states[1])
    assert torch.equal(other[2][:, :5], states[2][:, :5])
    assert not torch.allclose(other[2][:, 5], states[2][:, 5])
    assert torch.equal(made(inputs["tokens"]), states[0])


@pytest.mark.parametrize(("chunked", "in_forward"), [(False, False), (True, True), (True, False)])
def test_gradients_are_those_of_the_sum_and_the_loss_is_the_models(chunked: bool, in_forward: bool) -> None:
    made, inputs = model(), batch(2, 12, 3, seed=2)
    add = further_tokens(weight=0.5)
    inputs |= further_targets(inputs["tokens"], inputs["labels"], inputs["document_ids"], 2)
    labels = [inputs["labels"], *inputs["next_labels"].unbind(-1)]

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, list(made.parameters())))

    hidden = made(inputs["tokens"], next_tokens=inputs["next_tokens"])
    with mock.patch.object(torch, "mm", wraps=torch.mm) as products:
        if chunked:
            chunks = Chunks(5, in_forward=in_forward, factors=add.factors)
            every = chunked_token_losses(hidden, made.output.weight, torch.cat(labels), chunks)
        else:
            every = token_losses(made.output(hidden), torch.cat(labels))
        every = every.unflatten(0, (3, 2))
        add.count(every, torch.stack(labels))
        losses = first_losses(every, (1.0,) * 3 if chunked else add.factors)
        before = products.call_count
        ours = gradients(losses.sum() / 7)
        assert products.call_count == before or (chunked and not in_forward)  # no logits are computed again
    main = token_losses(made.output(made(inputs["tokens"])), labels[0])
    assert torch.allclose(losses, main, rtol=1e-13)
    theirs = by_hand(made, inputs["tokens"], inputs["next_tokens"])
    wanted = [token_losses(made.output(h), y).sum() for h, y in zip(theirs, labels, strict=True)]
    for gradient, other in zip(ours, gradients((wanted[0] + 0.25 * (wanted[1] + wanted[2])) / 7), strict=True):
        assert (gradient - other).norm() <= 1e-12 * other.norm()
    add.end_step(torch.zeros(()))
    with mock.patch("trainer.tasks.further_tokens.all_reduce", side_effect=lambda x, _: x):
        record, again = add.record({}), add.record({})
    means = [loss.item() / int((y != IGNORE_INDEX).sum()) for loss, y in zip(wanted, labels, strict=True)]
    assert record == pytest.approx({"mtp_loss_1": means[1], "mtp_loss_2": means[2]})
    assert again == {}


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3", "qwen3_next", "gemma3"])
def test_parameters_are_counted(family: str) -> None:
    args = replace(MODELS[family][1] if family in MODELS else ARGS, mtp_layers=2)
    with torch.device("meta"):
        made = Transformer(args)
    assert sum(x.numel() for x in made.parameters()) == args.n_params()
    shapes = {name: tuple(x.weight.shape) for name, x in made.named_modules() if isinstance(x, nn.Linear)}
    assert args.linear_shapes().items() >= shapes.items()
    added = args.flops_per_token(64)[0] - replace(args, mtp_layers=0).flops_per_token(64)[0]
    assert added > 2 * 6 * (args.vocab_size + 2 * args.dim) * args.dim  # with the output, once more for each


OF_DEEPSEEK = ("model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
OF_QWEN = ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("deepseek_v3", OF_DEEPSEEK),
        ("glm4_moe", OF_DEEPSEEK),
        ("glm4_moe_lite", OF_DEEPSEEK),
        ("qwen3_next", OF_QWEN),
        ("qwen3_5", OF_QWEN),
        ("qwen3_5_moe", OF_QWEN),
    ],
)
def test_weights_go_to_the_published_names_and_back(tmp_path: Path, family: str, names: tuple[str, ...]) -> None:
    args = replace(MODELS[family][1], mtp_layers=1)
    begin, *own = names
    begin = begin.replace("3", str(args.n_layers))
    made = model(args)
    write_here(tmp_path / "ours", family, args, made)
    files = whole_folder(tmp_path / "ours")
    layer_files = {name.removeprefix(begin): x for name, x in files.items() if name.startswith(begin)}
    assert {f"{name}.weight" for name in own} <= layer_files.keys()
    layer = made.layers[str(args.n_layers)]
    assert torch.equal(layer_files[f"{own[2]}.weight"], layer.projection.weight)
    inner = "layers.0." if names is OF_QWEN else ""
    assert torch.equal(layer_files[f"{inner}self_attn.o_proj.weight"], layer.attention.wo.weight)
    # Published folders repeat there what the layer shares.
    shared = {} if inner else {f"{begin}embed_tokens.weight": "model.embed_tokens.weight"}
    shared |= {} if inner else {f"{begin}shared_head.head.weight": "lm_head.weight"}
    folder = tmp_path / "published"
    folder.mkdir()
    save_file({name: files[x].clone() for name, x in shared.items()} | files, folder / "model.safetensors")
    back = read_here(folder, family, args)
    assert all(torch.equal(x, y) for x, y in zip(made.parameters(), back.parameters(), strict=True))
    without = replace(args, mtp_layers=0)
    assert read_here(folder, family, without).norm.weight.equal(made.norm.weight)


def test_a_folder_without_them_starts_them_anew(tmp_path: Path) -> None:
    family, args = MODELS["deepseek_v3"]
    with in_double():
        hf_decoder(family, args).save_pretrained(tmp_path)
    reader = HFReader(HFFolder(tmp_path), hf_model(model_spec(family), replace(args, mtp_layers=1)))
    assert reader.lacks_further
    assert not [name for name in reader.pairs if name.startswith(f"layers.{args.n_layers}.")]
    assert not HFReader(HFFolder(tmp_path), hf_model(model_spec(family), args)).lacks_further
    # One tensor of a layer alone is no layer.
    (file,) = tmp_path.glob("*.safetensors")
    surplus = {f"model.layers.{args.n_layers}.eh_proj.weight": torch.zeros(args.dim, 2 * args.dim)}
    save_file(load_file(file) | surplus, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"there is no model\.layers\.{args.n_layers}\..* and \d+ more"):
        HFReader(HFFolder(tmp_path), hf_model(model_spec(family), replace(args, mtp_layers=1)))


def test_what_transformers_reads_is_the_model_without_them(tmp_path: Path) -> None:
    import transformers

    family, args = "deepseek_v3", replace(MODELS["deepseek_v3"][1], mtp_layers=1)
    made = model(args)
    write_here(tmp_path, family, args, made)
    tokens = torch.randint(0, args.vocab_size, (2, 9))
    with in_double():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").double()
        theirs.set_experts_implementation("eager")
        logits = theirs(tokens).logits
    assert (made.output(made(tokens)) - logits).norm() <= 1e-10 * logits.norm()


def test_families_without_published_ones_leave_them_out() -> None:
    pairs = hf_model(model_spec("llama3"), ARGS)
    assert pairs.has_further
    assert not pairs.further
    assert not [name for name in pairs.pairs if name.startswith(("layers.2.", "layers.3."))]
    assert hf_config("llama3").write(ARGS)["num_hidden_layers"] == 2


PUBLISHED = {
    "enorm.weight": (7168,),
    "hnorm.weight": (7168,),
    "eh_proj.weight": (7168, 14336),
    "shared_head.norm.weight": (7168,),
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "mlp.gate.weight": (256, 7168),
    "mlp.gate.e_score_correction_bias": (256,),
    "mlp.experts.255.down_proj.weight": (7168, 2048),
    "mlp.shared_experts.up_proj.weight": (2048, 7168),
}
"""Tensors of the further layer of DeepSeek-V3."""


def test_shapes_are_those_of_deepseek_v3() -> None:
    flavors = FAMILIES["deepseek_v3"].flavors
    args = replace(flavors["V3"], mtp_layers=1)
    shapes = hf_model(model_spec("deepseek_v3"), args).shapes()
    for name, shape in PUBLISHED.items():
        assert shapes[f"model.layers.61.{name}"] == shape
    layer_size = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith("model.layers.61."))
    assert layer_size == args.n_params() - flavors["V3"].n_params() + 256  # biases for the choice are no parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora.rank=4", "--optimizer.name=AdamW"], "mtp_layers = 1 has no effect with adapters"),
        (["--training.dataset=preferences", "--training.dataset_path=."], "has no effect with adapters .* preferences"),
        (["--model.mtp_layers=-1"], "model.mtp_layers = -1 must be at least 0"),
    ],
)
def test_settings_that_cannot_be(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(parse_command_line(["--model.mtp_layers=1", *arguments]).config, 1, "cpu", weights_checked=True)


def test_a_family_without_them_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [
        "--model.mtp_layers=1",
        "--job.imports",
        "examples.toy_family",
        "--model.name=toy",
        "--model.flavor=toy",
    ]
    with pytest.raises(ConfigError, match=r"model\.mtp_layers = 1: model\.name = 'toy' has no layers"):
        resolve(parse_command_line(settings).config, 1, "cpu")


@pytest.mark.parametrize("degree", [2, 4])
def test_a_pipeline_has_them_behind_the_norm(degree: int) -> None:
    settings = ["--model.mtp_layers=2", f"--parallelism.pipeline_parallel_degree={degree}"]
    settings += ["--training.local_batch_size=8"]
    stages = resolve(parse_command_line(settings).config, degree, "cpu").pipeline.stages
    assert stages[-1][-4:] == ("norm", "output", "layers.4", "layers.5")
    assert [name for stage in stages for name in stage].count("layers.4") == 1
