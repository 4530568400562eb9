"""Law: a run that starts from adapters of peft continues the run of peft; to-peft and back changes no bit."""

import json
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from tests.distributed import test_lora
from tests.distributed.pool import WorkerPool
from tests.distributed.test_hugging_face import initial, precise, rows
from tests.distributed.test_lora import ALPHA, RANK
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.commands import convert
from trainer.data.packing import IGNORE_INDEX

pytestmark = pytest.mark.about("trainer/checkpoint/peft_table.py", "trainer/stores/initial_weights.py")
TARGETS, MODULES = ["q_proj", "v_proj", "down_proj"], ["--lora.modules", "wq", "wv", "w2"]


STEPS = 5


def train(folder: str, hf: str, arguments: list[str]) -> dict:
    with mock.patch.object(test_lora, "STEPS", STEPS):
        return test_lora.train(folder, hf, [f"--training.steps={STEPS}", *arguments])


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "hf"
    initial("plain").save_pretrained(folder)
    return folder


def peft_of(hf: Path, targets: list[str]) -> PeftModel:
    """Adapters that have been trained: B is not zero."""
    settings = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=targets)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(hf, dtype=torch.float64), settings).to(torch.float64)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return model


def start_from(adapters: Path) -> list[str]:
    return [f"--checkpoint.initial_load_path={adapters}", *MODULES]


def steps_of_peft(model: PeftModel, rates: list[float]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    records = []
    for step, rate in enumerate(rates):
        batch = rows(step)
        valid = int((batch["labels"] != IGNORE_INDEX).sum())
        logits = model(batch["tokens"], use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / valid
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for parameter in trained:
            parameter.grad *= min(0.5 / norm, 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        records.append((loss.item(), norm.item()))
    return records


@pytest.mark.parametrize("layout", ["one", "fsdp2", *slow("tp2", "pp2", "fsdp2+tp2")])
def test_a_run_of_peft_continues_here(pool: WorkerPool, hf: Path, tmp_path: Path, layout: str) -> None:
    theirs = peft_of(hf, TARGETS)
    theirs.save_pretrained(tmp_path / "adapters")
    ranks, arguments = (1, []) if layout == "one" else LAYOUTS[layout]
    run = tmp_path / "run"
    got = pool.run(ranks, train, str(run), str(hf), [*start_from(tmp_path / "adapters"), *arguments])[0]["metrics"]
    with precise("plain", "float64"):
        wanted = steps_of_peft(theirs, [line["lr"] for line in got])
        fresh = steps_of_peft(
            get_peft_model(LlamaForCausalLM.from_pretrained(hf, dtype=torch.float64), LoraConfig()), [0]
        )
    for line, (loss, norm) in zip(got, wanted, strict=True):
        assert abs(line["loss"] - loss) < 1e-10 * loss
        assert abs(line["grad_norm"] - norm) < 1e-10 * norm
    assert abs(got[0]["loss"] - fresh[0][0]) > 1e-4, "new adapters have another loss"


def test_to_peft_and_back_changes_no_bit(pool: WorkerPool, hf: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    single = ["--training.dtype=float32", "--lora.whole", "tok_embeddings"]
    trained = pool.run(1, train, str(first), str(hf), [*MODULES, *single])[0]["after"]
    assert convert.main(["to-peft", str(first), str(tmp_path / "adapters")]) == 0
    again = pool.run(1, train, str(second), str(hf), [*start_from(tmp_path / "adapters"), *single])[0]["before"]
    compared = [name for name in again if "lora_" in name or name.startswith("tok_embeddings")]
    assert len(compared) > 10
    for name in again:
        assert torch.equal(again[name], trained[name]), name
    assert convert.main(["to-peft", str(second), str(tmp_path / "again")]) == 0
    settings = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(hf), "the base is the model, and not the adapters"
    tensors = [
        safetensors.torch.load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "again")
    ]
    assert tensors[0].keys() == tensors[1].keys()
    assert any(not torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]), "it has trained on"
