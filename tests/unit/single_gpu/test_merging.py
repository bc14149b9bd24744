"""Merging: what is written gives the logits of base and adapter, and what cannot be merged leaves nothing behind."""

import json
import os
import shutil

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_bases import load, nf4, save_base
from transformers import AutoTokenizer

from trl_drgrpo import lora_preset
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.single_gpu import merging
from trl_drgrpo.single_gpu.merging import merge_adapter

IDS = torch.arange(3, 27).unsqueeze(0)


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"), tokenizer)


def save_adapter(base, folder, scale=0.3, **changes):
    """An adapter with weights that matter."""
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes})
    model = get_peft_model(load(base), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "lora_A" not in name:
                p.add_(scale * torch.randn(p.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return save_adapter(base, tmp_path_factory.mktemp("adapter"))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def unmerged(base, adapter):
    return logits(PeftModel.from_pretrained(load(base), adapter))


def assert_merged(adapter, output, base):
    """Merges: what is written gives the logits of base and adapter."""
    merge_adapter(adapter, output)
    torch.testing.assert_close(logits(load(output)), unmerged(base, adapter), rtol=1e-4, atol=1e-4)


def test_a_qlora_run_is_merged_into_the_full_precision_base(base, tmp_path, train, output, tokenizer, ran, capfd):
    each_step = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    train(model=base, peft_config=lora_preset("qlora"), **each_step).save_model()
    whole = tmp_path / "merged"
    capfd.readouterr()
    report = yaml.safe_load(ran(["merge", str(output), "--output", str(whole)]).out)
    assert (report["output_dir"], report["base"], report["dtype"]) == (str(whole), base, "float32")
    assert report["max_logit_difference"] < 1e-4 < report["adapter_effect"]
    merged = load(whole)
    assert not any(p.dtype != torch.float32 for p in merged.parameters())
    torch.testing.assert_close(logits(merged), unmerged(base, output), rtol=1e-4, atol=1e-4)
    assert (logits(merged) - logits(load(base))).abs().max() > 1e-3
    assert merged.config.use_cache is True
    assert AutoTokenizer.from_pretrained(whole).chat_template == tokenizer.chat_template
    assert (whole / "generation_config.json").is_file()
    assert not (whole / "adapter_config.json").exists()
    # A checkpoint is an adapter's folder, too; the two differ.
    merge_adapter(output / "checkpoint-1", tmp_path / "first")
    assert not torch.equal(logits(load(tmp_path / "first")), logits(merged))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_agrees_and_reports_its_rounding(base, adapter, tmp_path, dtype):
    report = merge_adapter(adapter, tmp_path / "m", dtype=dtype)
    merged = load(tmp_path / "m", dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {getattr(torch, dtype)}
    measured = (logits(merged.float()) - unmerged(base, adapter)).abs().max().item()
    bounds = {"float32": (0, 1e-5), "bfloat16": (1e-4, 5e-2), "float16": (1e-5, 5e-3)}[dtype]
    for difference in (measured / report.max_logit, report.max_logit_difference / report.max_logit):
        assert bounds[0] <= difference < bounds[1]
        assert difference < merging.TOLERANCES[dtype] / 2


def test_the_dtype_is_the_bases_own_by_default_and_lost_training_is_said(tokenizer, tmp_path, caplog):
    base = save_base(tmp_path / "base", tokenizer, dtype=torch.bfloat16)
    small = save_adapter(base, tmp_path / "small", scale=1e-4)
    report = merge_adapter(small, tmp_path / "merged")
    assert report.dtype == "bfloat16"
    assert report.max_logit_difference > report.adapter_effect / 2
    assert "much of what was trained is lost" in caplog.text
    caplog.clear()
    report = merge_adapter(small, tmp_path / "exact", dtype="float32")
    assert report.max_logit_difference < report.adapter_effect / 10
    assert caplog.records == []


VARIANTS = {
    "dora": {"use_dora": True},
    "rank-stabilized": {"use_rslora": True},
    "head in full": {"modules_to_save": ["lm_head"]},
    "embeddings in full": {"modules_to_save": ["embed_tokens"]},
    "adapted embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "some tokens": {"trainable_token_indices": [60, 70]},
    "parameters": {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_of_lora_merges(base, tmp_path, changes):
    assert_merged(save_adapter(base, tmp_path / "a", **changes), tmp_path / "m", base)


TIED = [
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"]},
    {"target_modules": ["embed_tokens", "q_proj"]},
]


@pytest.mark.parametrize("changes", TIED, ids=["head", "embeddings", "adapted embeddings"])
def test_merges_that_untie_embeddings_are_right_or_refused(tokenizer, tmp_path, changes):
    base = save_base(tmp_path / "base", tokenizer, tie_word_embeddings=True)
    adapter = save_adapter(base, tmp_path / "a", **changes)
    try:
        assert_merged(adapter, tmp_path / "m", base)
    except InputError as error:
        assert "merged model: got logits that differ" in str(error)  # noqa: PT017  # either way is right
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "base"]


def test_revision_and_trust_reach_the_base(adapter, tmp_path, monkeypatch):
    class Seen(Exception):
        pass

    def load(name, model_class, **loading):
        raise Seen(name, loading)

    theirs = shutil.copytree(adapter, tmp_path / "adapter")
    content = json.loads((theirs / "adapter_config.json").read_text())
    (theirs / "adapter_config.json").write_text(json.dumps({**content, "revision": "v1"}))
    monkeypatch.setattr(merging, "load", load)
    with pytest.raises(Seen) as caught:
        merge_adapter(theirs, tmp_path / "m", trust_remote_code=True)
    assert caught.value.args == (content["base_model_name_or_path"], {"revision": "v1", "trust_remote_code": True})


@pytest.mark.parametrize("changes", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}], ids=["lora", "in full"])
def test_a_vocabulary_that_the_run_extended(base, tmp_path, changes):
    model = load(base)
    rows = model.config.vocab_size + 3
    model.resize_token_embeddings(rows)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False, **changes))
    model.save_pretrained(tmp_path / "a")
    merge_adapter(tmp_path / "a", tmp_path / "m")
    merged = load(tmp_path / "m")
    assert merged.config.vocab_size == rows
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)


def test_base_and_adapter_in_several_files(base, tmp_path):
    load(base).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    adapter = save_adapter(str(tmp_path / "sharded"), tmp_path / "a")
    shutil.copytree(adapter, adapter / "ref")  # as a run with beta > 0 leaves it
    assert_merged(adapter, tmp_path / "m", base)


def test_a_link_to_an_empty_folder_is_filled(adapter, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    merge_adapter(adapter, tmp_path / "link")
    assert (tmp_path / "disk" / "config.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_use_cache_is_restored_and_the_adapters_tokenizer_wins(base, adapter, tokenizer, tmp_path):
    mine = shutil.copytree(base, tmp_path / "base")
    for file in ("config.json", "generation_config.json"):
        content = json.loads((mine / file).read_text())
        (mine / file).write_text(json.dumps({**content, "use_cache": False}))
    theirs = shutil.copytree(adapter, tmp_path / "adapter")
    tokenizer.save_pretrained(theirs)
    (theirs / "chat_template.jinja").write_text("of the run")
    merge_adapter(theirs, tmp_path / "m", base=str(mine))
    merged = load(tmp_path / "m")
    assert (merged.config.use_cache, merged.generation_config.use_cache) == (True, True)
    assert AutoTokenizer.from_pretrained(tmp_path / "m").chat_template == "of the run"


def test_a_base_that_has_moved(base, adapter, tmp_path, ran):
    copy = shutil.copytree(adapter, tmp_path / "adapter")
    content = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**content, "base_model_name_or_path": "/gone/base"}))
    error = ran(["merge", str(copy), "--output", str(tmp_path / "m")], 2).err.strip().splitlines()[-1]
    assert error == (
        "error: base: got /gone/base, which does not exist; expected a model's folder or Hub id. "
        "Check the path. If it has moved, name where it is now with --base (base=...)."
    )
    assert merge_adapter(copy, tmp_path / "m", base=base).base == base


@pytest.fixture
def refused(tmp_path):
    def refused(adapter_dir, output=None, **options):
        with pytest.raises(InputError) as caught:
            merge_adapter(adapter_dir, output or tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
        assert not [name for name in os.listdir(tmp_path) if "part" in name]
        return str(caught.value)

    return refused


def test_bad_input_is_one_clear_error_and_leaves_nothing(base, adapter, tokenizer, model, tmp_path, refused):
    assert "adapter: got /nowhere, which does not exist" in refused("/nowhere")
    assert "a whole model" in refused(base)
    (tmp_path / "empty").mkdir()
    assert "a folder without adapter_config.json" in refused(tmp_path / "empty")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert f"output: got {tmp_path}/full, which exists" in refused(adapter, tmp_path / "full")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert f"output: got {tmp_path}/loop, which exists" in refused(adapter, tmp_path / "loop")
    assert "dtype: got 'int8'" in refused(adapter, dtype="int8")
    assert "a folder without config.json" in refused(adapter, base=str(tmp_path / "empty"))
    assert "base: got some/model, which is not in the local cache" in refused(adapter, base="some/model")
    named = tmp_path / "named"
    shutil.copytree(adapter, named / "first")
    shutil.copytree(adapter, named / "second")
    assert f"Name one of them: {named}/first, {named}/second." in refused(named)
    other = save_base(tmp_path / "other", tokenizer, hidden_size=32, head_dim=8)
    assert "which does not fit the base model" in refused(adapter, base=other)
    prompt = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    get_peft_model(model, prompt).save_pretrained(tmp_path / "prompt")
    assert "of type PROMPT_TUNING" in refused(tmp_path / "prompt", base=base)
    get_peft_model(model, LoraConfig(target_modules="all-linear")).save_pretrained(tmp_path / "nameless")
    assert "the adapter does not name its base model" in refused(tmp_path / "nameless")
    (named / "first" / "adapter_config.json").write_text('{"peft_type": "NEW"}')
    assert "which cannot be read" in refused(named / "first")
    load(base, quantization_config=nf4()).save_pretrained(tmp_path / "quantized")
    assert "whose weights are quantized" in refused(adapter, base=str(tmp_path / "quantized"))
    assert "output: got" in refused(adapter, "/proc/merged")


def test_a_folder_that_cannot_be_renamed_to_is_refused_at_once(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "base_of", lambda *args: pytest.fail("went on"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"output: got .*which cannot be renamed to.*merged\."):
        merge_adapter(adapter, ".")
    monkeypatch.setattr("pathlib.Path.is_mount", lambda self: True)
    with pytest.raises(InputError, match="cannot be renamed to"):
        merge_adapter(adapter, tmp_path / "volume")


def test_an_adapter_of_other_layers_and_damaged_files(base, adapter, tokenizer, tmp_path, refused):
    shallow = save_base(tmp_path / "shallow", tokenizer, num_hidden_layers=1)
    message = refused(adapter, base=shallow)
    assert "does not fit the base model" in message
    assert "layers.1" in message
    assert "has no place for (14 such weights)" in message
    deep = save_base(tmp_path / "deep", tokenizer, num_hidden_layers=3)
    by_name = save_adapter(base, tmp_path / "by-name", target_modules=["q_proj"])
    assert "It holds nothing for" in refused(by_name, base=deep)
    damaged = shutil.copytree(adapter, tmp_path / "damaged")
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "whose weights do not load" in refused(damaged)
    weights.unlink()
    assert "without adapter_model.safetensors" in refused(damaged)
    (tmp_path / "shallow" / "model.safetensors").unlink()
    assert f"base: got {shallow}, whose weights do not load" in refused(adapter, base=shallow)
    biased = save_adapter(base, tmp_path / "biased", target_modules=["q_proj"], lora_bias=True)
    assert "which cannot be merged" in refused(biased)


def test_weights_that_are_not_finite_are_refused(base, adapter, tmp_path, refused):
    broken = shutil.copytree(adapter, tmp_path / "broken")
    weights = load_file(broken / "adapter_model.safetensors")
    next(reversed(weights.values()))[0, 0] = torch.nan
    save_file(weights, broken / "adapter_model.safetensors", metadata={"format": "pt"})
    message = refused(broken)
    assert message.startswith(f"adapter: got {broken}, whose weight base_model.model.")
    model = load(base)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e5  # beyond float16
    large = tmp_path / "large"
    model.save_pretrained(large)
    assert "dtype: got float16, which cannot hold model.layers.0.mlp.up_proj" in refused(
        adapter, base=str(large), dtype="float16"
    )


@pytest.mark.parametrize("scale", [0.3, 2e-5])  # the second moves logits by less than the tolerance of float32
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_that_went_wrong_is_refused_and_leaves_nothing(base, tmp_path, monkeypatch, scale, dtype):
    adapter = save_adapter(base, tmp_path / "a", scale=scale)

    def forgets_to_merge(self, *args, **kwargs):
        return self.unload()

    monkeypatch.setattr("peft.tuners.lora.LoraModel.merge_and_unload", forgets_to_merge)
    with pytest.raises(InputError, match="merged model: got logits that differ by .* Nothing was written"):
        merge_adapter(adapter, tmp_path / "m", dtype=dtype)
    assert list(tmp_path.iterdir()) == [adapter]


def test_weights_that_were_written_wrongly_are_refused(adapter, tmp_path, monkeypatch):
    write = merging._write

    def damaged(*args):
        result = write(*args)
        (path,) = args[-1].glob("*.safetensors")
        weights = load_file(path)
        save_file(
            {name: w.roll(1, 0) if "q_proj" in name else w for name, w in weights.items()}, path, {"format": "pt"}
        )
        return result

    monkeypatch.setattr(merging, "_write", damaged)
    with pytest.raises(InputError, match="merged model: got logits that differ"):
        merge_adapter(adapter, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing_under_the_name(adapter, tmp_path, monkeypatch):
    def interrupted(*args):
        assert [path.name for path in tmp_path.iterdir()] != ["m"]  # written, but not under its name
        raise KeyboardInterrupt

    monkeypatch.setattr(merging, "_save_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(adapter, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_changes_nothing_is_said(base, tmp_path, caplog):
    merge_adapter(save_adapter(base, tmp_path / "a", scale=0.0), tmp_path / "m")
    assert "changes nothing" in caplog.text
