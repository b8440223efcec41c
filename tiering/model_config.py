"""What a model's KV weighs, from its `config.json`.  Understands the kinds of attention that it
names, and refuses every other model by its type: a size that was guessed is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from storage.errors import ConfigError
from tiering.presets import LayerKind, Preset, PresetError

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}

# fmt: off
_HEADED = frozenset({  # layers of K and V per KV head
    "apertus", "arcee", "baichuan", "bloom", "cohere", "ernie4_5", "ernie4_5_moe", "exaone",
    "falcon", "gemma", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gptj",
    "granite", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm", "internlm2",
    "internlm3", "llama", "minimax_m2", "ministral", "mistral", "mixtral", "mpt", "nemotron",
    "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
})
# fmt: on
# Those whose layers have windows in a repeating pattern, which `layer_types` may leave out: of so
# many layers the last sees everything.
_PATTERNED = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3_text": 6}
_LATENT = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"})
_LATENT_WITH_INDEX = frozenset({"deepseek_v32", "glm_moe_dsa"})

_RECURRENT = re.compile(
    r"mamba|jamba|bamba|zamba|rwkv|recurrent|xlstm|nemotron_h|hybrid|qwen3_next|qwen3_5|linear|"
    r"plamo|lfm2|falcon_h1|^minimax$"
)
_ENCODER = re.compile(r"^(m?t5|bart|mbart|whisper|umt5|bert|roberta|clip|siglip)")

# Of the sparse kernels of DeepSeek-V3.2: 512 latent numbers in fp8, four scales, 64 RoPE numbers in
# bf16; and of its indexer: one scale for each 128 numbers in fp8.
_SPARSE_FP8_BYTES = 512 + 4 * 4 + 64 * 2
_SPARSE_BLOCK_TOKENS = 64
_INDEX_SCALE_BYTES, _INDEX_SCALE_NUMBERS = 4, 128
_BLOCK_TOKENS = 16


def read_model_config(
    path: Path, dtype: str | None = None, tokens_per_block: int | None = None
) -> Preset:
    """The model whose `config.json` is at `path`, or in the directory `path`.

    `dtype` (one of `ELEMENT_BYTES`; default: the model's own) is that of the KV, and
    `tokens_per_block` (default: 16, or 64 where the kernels ask for it) the engine's block.  Pages
    are taken to have no padding.  Raises `PresetError` for a file or a model that is not
    understood, `ConfigError` for a dtype that is not.
    """
    if path.is_dir():
        path = path / "config.json"
    try:
        whole = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as exc:
        raise PresetError(f"{path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise PresetError(f"{path}: {exc}") from exc
    model = _ModelConfig(path, {**whole, **_text_part(whole)})
    dtype = dtype or model.dtype
    if dtype not in ELEMENT_BYTES:
        raise ConfigError("--dtype", f"one of {', '.join(ELEMENT_BYTES)}", dtype)
    if model.kind in _LATENT | _LATENT_WITH_INDEX:
        layers = _latent_layers(model, dtype)
        per_group: list[int] = []
    elif model.kind in _HEADED or model.kind in _PATTERNED:
        layers, per_group = _headed_layers(model, dtype)
    else:
        raise model.not_understood(_why(model.kind))
    sparse = model.kind in _LATENT_WITH_INDEX
    tokens = tokens_per_block or (_SPARSE_BLOCK_TOKENS if sparse else _BLOCK_TOKENS)
    return Preset(
        model=path.absolute().parent.name or model.kind,
        tp=(1,),
        tokens_per_block=tokens,
        layers=tuple(
            msgspec.structs.replace(layer, page_bytes=tokens * layer.page_bytes) for layer in layers
        ),
        note=f"From {path}: {model.kind}, KV in {dtype}, pages without padding.",
        groups=max(1, len(per_group)),
        layers_per_group=tuple(per_group),
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that also sees or hears: the part that has KV."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else {}


def _why(kind: str) -> str:
    if _RECURRENT.search(kind):
        return "it has layers with a recurrent state instead of KV"
    if _ENCODER.search(kind):
        return "an encoder, whose KV no prefix shares"
    if kind.startswith("deepseek_v4"):
        return "its compressed pages do not follow from it; see --preset deepseek-v4-flash"
    return "not among those that it knows"


class _ModelConfig:
    """The fields of a `config.json`, by the names that different models give them."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path = path
        self.fields = fields

    @property
    def kind(self) -> str:
        kind = self.fields.get("model_type")
        if not isinstance(kind, str):
            raise PresetError(f"{self.path}: expected the config.json of a model (no model_type)")
        return kind

    @property
    def dtype(self) -> str:
        name = str(self.fields.get("torch_dtype") or self.fields.get("dtype") or "bfloat16")
        return _DTYPES.get(name.removeprefix("torch."), "bf16")

    def not_understood(self, why: str) -> PresetError:
        return PresetError(
            f"{self.path}: model_type {self.kind!r}: kvtier can't size its KV from this file "
            f"({why}); give --worker-bytes, from the line that an engine logs at its start"
        )

    def find(self, *names: str) -> int | None:
        """The first of these fields that is set."""
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PresetError(f"{self.path}: {name}: expected a number above 0, got {value!r}")
            return value
        return None

    def number(self, *names: str) -> int:
        value = self.find(*names)
        if value is None:
            raise PresetError(f"{self.path}: {names[0]}: expected a number above 0, found none")
        return value

    @property
    def layer_count(self) -> int:
        return self.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")

    @property
    def kv_heads(self) -> int:
        # The two models with one KV head say so in words, not in numbers.
        if self.fields.get("multi_query") and not self.fields.get("new_decoder_architecture"):
            return 1
        found = self.find("num_key_value_heads", "num_kv_heads", "n_head_kv")
        return found or self.number(*_QUERY_HEADS)

    @property
    def head_dim(self) -> int:
        found = self.find("head_dim")
        if found is not None:
            return found
        return self.number("hidden_size", "n_embd", "d_model") // self.number(*_QUERY_HEADS)


_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads")


def _latent_layers(model: _ModelConfig, dtype: str) -> list[LayerKind]:
    """Bytes of one token: one latent vector for all heads, and what an indexer keeps of it."""
    numbers = model.number("kv_lora_rank") + model.number("qk_rope_head_dim")
    token_bytes = numbers * ELEMENT_BYTES[dtype]
    if model.kind not in _LATENT_WITH_INDEX:
        return [LayerKind("mla", model.layer_count, token_bytes, 1)]
    if (model.find("index_topk_freq") or 1) > 1 or model.fields.get("index_topk_pattern"):
        raise model.not_understood("layers share an indexer in a pattern of its own")
    if dtype == "fp8":
        token_bytes = _SPARSE_FP8_BYTES
    index_numbers = model.number("index_head_dim")
    index_bytes = index_numbers + index_numbers // _INDEX_SCALE_NUMBERS * _INDEX_SCALE_BYTES
    return [
        LayerKind("mla", model.layer_count, token_bytes, 1),
        LayerKind("indexer", model.layer_count, index_bytes, 1),
    ]


def _headed_layers(model: _ModelConfig, dtype: str) -> tuple[list[LayerKind], list[int]]:
    """Bytes of one token and KV head, and how many layers each group has.

    Layers that see everything and layers with a window stand in groups, which take turns in the
    same memory.  vLLM takes the fewer of the two for the most layers of a group, or the more if
    those are less than half as many again, and divides each kind evenly among its groups.
    """
    heads = model.kv_heads
    name = "mha" if heads == model.number(*_QUERY_HEADS) else "gqa" if heads > 1 else "mqa"
    token_bytes = 2 * model.head_dim * ELEMENT_BYTES[dtype]
    windowed = _windowed_layers(model)
    counts = [count for count in (windowed, model.layer_count - windowed) if count]
    per_group = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups = [
        len(range(first, count, -(-count // per_group)))
        for count in counts
        for first in range(-(-count // per_group))
    ]
    return [LayerKind(name, max(groups), token_bytes, heads)], groups


def _windowed_layers(model: _ModelConfig) -> int:
    """How many layers attend over a window only."""
    types = model.fields.get("layer_types")
    if isinstance(types, list):
        if other := sorted({str(t) for t in types} - {"full_attention", "sliding_attention"}):
            raise model.not_understood(f"layers of type {', '.join(other)}")
        return types.count("sliding_attention")
    if model.fields.get("sliding_window") is None:
        return 0
    pattern = model.find("sliding_window_pattern") or _PATTERNED.get(model.kind)
    if pattern is not None:
        return model.layer_count - model.layer_count // pattern
    if model.kind.startswith("qwen"):  # has a window in its file whether it is used or not
        if model.fields.get("use_sliding_window"):
            raise model.not_understood("windows in some layers, and no layer_types")
        return 0
    return model.layer_count
