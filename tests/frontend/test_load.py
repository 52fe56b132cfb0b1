"""Finding models: by name, by settings, from a user's file, from Hugging Face; and what is said when that fails."""

import pytest
import torch

import weft_zoo as zoo
from weft.core.errors import CaptureError, UnknownName

USER = """
import torch
from torch import nn

def make(width=4):
    model = nn.Linear(width, 1)
    return model, lambda m, b: m(b["x"]).pow(2).mean(), {"x": torch.ones(3, width, device="cpu")}

def wrong():
    return nn.Linear(2, 2)
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


def test_settings_change_sizes():
    work = zoo.get("llama3-8b", layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=100)
    assert len(work.model.blocks) == 2
    assert work.model.head.weight.shape == (100, 64)
    assert work.settings.theta == 500000.0


def test_unknown_model_lists_near_names():
    with pytest.raises(UnknownName) as error:
        zoo.get("lama3-8b")
    assert "no model named 'lama3-8b'" in str(error.value)
    assert "llama3-8b" in error.value.repairs


def test_unknown_model_with_nothing_near_lists_all():
    with pytest.raises(UnknownName, match="mixtral-8x7b"):
        zoo.get("zzzzzzzz")


def test_unknown_setting_is_named_with_those_there_are():
    with pytest.raises(UnknownName, match="llama3-8b has no setting 'layer'") as error:
        zoo.get("llama3-8b", layer=2)
    assert error.value.repairs[0] == "layers"


def test_user_function(user_file):
    work = zoo.load(f"{user_file}:make", device="cpu", width=5)
    assert work.example(7)["x"].shape == (7, 5)
    assert work.loss(work.model, work.example(2)).shape == ()


def test_user_function_on_meta(user_file):
    assert zoo.load(f"{user_file}:make").model.weight.is_meta


def test_user_function_that_is_not_there(user_file):
    with pytest.raises(UnknownName, match="has no function 'other'"):
        zoo.load(f"{user_file}:other")


def test_user_file_that_is_not_there():
    with pytest.raises(UnknownName, match="no file nowhere"):
        zoo.load("nowhere.py:f")


def test_user_function_that_returns_something_else(user_file):
    with pytest.raises(CaptureError, match=r"needed.*model, loss, batch"):
        zoo.load(f"{user_file}:wrong")


@pytest.mark.parametrize(
    ("batch", "found"),
    [('{"x": 3}', "found   no tensor"), ("{}", "found   no tensor"), ('{"t": torch.ones(())}', "found   t")],
)
def test_a_batch_that_cannot_be_read_is_refused(tmp_path, batch, found):
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\ndef make(): return torch.nn.Linear(1, 1), lambda m, b: m(b), {batch}\n")
    with pytest.raises(CaptureError) as error:
        zoo.load(f"{path}:make")
    assert found in str(error.value) and "has no samples" in str(error.value) and "a tensor with samples first" in str(error.value)


@pytest.mark.parametrize("batch", ["x", "(x, x)", '{"x": x, "y": [x, (x, 2.0)]}'])
def test_a_batch_of_any_structure_is_the_losses_own(tmp_path, batch):
    """One tensor at several places is several inputs: Hugging Face's labels are often the very tensor that input_ids are."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nx = torch.ones(3, 1)\n"
        "def flat(b): return [b] if isinstance(b, (torch.Tensor, float)) else sum(map(flat, b.values() if isinstance(b, dict) else b), [])\n"
        f"def make(): return torch.nn.Linear(1, 1), lambda m, b: sum((m(v).sum() if hasattr(v, 'sum') else v) for v in flat(b)), {batch}\n"
    )
    work = zoo.load(f"{path}:make", device="cpu")
    example = work.example(5)
    assert len(example) == batch.count("x") - batch.count('"x"') and all(v.shape == (5, 1) for v in example.values())
    want = sum(work.model(v).sum() for v in example.values()) + (2.0 if "2.0" in batch else 0.0)
    assert torch.equal(work.loss(work.model, example), want)


def test_a_file_finds_its_neighbours(tmp_path):
    (tmp_path / "beside_mine.py").write_text("WIDTH = 6\n")
    (tmp_path / "uses.py").write_text(USER.replace("import torch", "import torch\nfrom beside_mine import WIDTH", 1).replace("width=4", "width=WIDTH"))
    assert zoo.load(f"{tmp_path}/uses.py:make").model.weight.shape == (1, 6)


def test_a_file_without_its_function_is_told_what_lacks():
    with pytest.raises(UnknownName, match=r"try\s+my.py:make"):
        zoo.load("my.py")


def tiny_gpt2():
    from transformers import GPT2Config

    return GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=67, n_positions=16)


def test_hugging_face_config():
    work = zoo.load(tiny_gpt2(), device="cpu")
    loss = work.loss(work.model, work.example(2))
    assert work.name == "GPT2LMHeadModel"
    assert torch.isfinite(loss)
    assert work.model.lm_head.weight is work.model.transformer.wte.weight


def test_hugging_face_directory_and_weights(tmp_path):
    made = zoo.load(tiny_gpt2(), device="cpu", seed=3)
    made.model.save_pretrained(tmp_path)
    again = zoo.load(f"hf:{tmp_path}", device="meta", weights=tmp_path)
    batch = made.example(2)
    made.model.eval()
    again.model.eval()
    torch.testing.assert_close(again.loss(again.model, batch), made.loss(made.model, batch))


def test_hugging_face_directory_that_is_not_there():
    with pytest.raises(UnknownName, match="local files only"):
        zoo.load("hf:/nonexistent")


def test_weights_of_another_model_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"stranger": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CaptureError, match="stranger"):
        zoo.load(tiny_gpt2(), weights=tmp_path)


def test_batches_of_models_of_images_and_of_sound() -> None:
    """A model that takes images too says of its text in a part of its config; log-mel features have their own lengths."""
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 99}
    config = transformers.Gemma3Config(text_config={**text, "max_position_embeddings": 64}, architectures=["Gemma3ForConditionalGeneration"])
    assert zoo.load(config).fields(2)["input_ids"].shape == (2, 64)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 99}
    sound = transformers.WhisperConfig(**sizes, max_target_positions=24, architectures=["WhisperForConditionalGeneration"], pad_token_id=0)
    fields = zoo.load(sound).fields(2)
    assert fields["input_features"].shape == (2, 80, 3000) and fields["labels"].shape == (2, 24)


def test_samples_are_counted_by_most_tensors(tmp_path):
    """A mask or positions that all samples share may come first."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def make(): return torch.nn.Linear(1, 1), lambda m, b: m(b), "
        '{"mask": torch.ones(6, 6), "positions": torch.ones(1, 6), "x": torch.ones(4, 6), "y": torch.ones(4, 6)}\n'
    )
    made = zoo.load(f"{path}:make").example(8)
    assert {n: len(x) for n, x in made.items()} == {"mask": 6, "positions": 1, "x": 8, "y": 8}
