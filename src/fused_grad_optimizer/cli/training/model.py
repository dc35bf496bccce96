"""The model: the built-in small Llama, a config.json, or a local Hugging Face folder. Nothing is ever downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from fused_grad_optimizer.cli.training.config import Settings, UsageError
from fused_grad_optimizer.cli.training.data import Tokens

# 3.3M parameters: about 0.15 s a step of 1,024 tokens on two CPU cores.
SMALL_LLAMA: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
}
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def quiet_transformers() -> None:
    """No network, no progress bars, no advice. To be called before transformers is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_config(model: str | None, needs_weights: bool = True) -> Any:
    """The model's transformers config; a folder must hold weights as well, if they are needed."""
    from transformers import AutoConfig, LlamaConfig

    if model is None:
        return LlamaConfig(**SMALL_LLAMA)
    path = Path(model)
    if path.is_dir() and not (path / "config.json").exists():
        raise UsageError(f"--model {path} holds no config.json; give a Hugging Face model folder or a config.json")
    if path.is_dir() and needs_weights and not any(file for pattern in WEIGHT_FILES for file in path.glob(pattern)):
        raise UsageError(f"--model {path} holds no weights; give {path / 'config.json'} to start from random ones")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever a model's own config class raises
        raise UsageError(f"--model {path} is not a Hugging Face model config: {_one_line(error)}") from error


def check_fits(config: Any, tokens: Tokens, settings: Settings) -> None:
    """Refuse tokens or a sequence that the model has no place for."""
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if vocabulary is not None and tokens.vocabulary > vocabulary:
        remedy = (
            "put a tokenizer beside it, or use a vocab_size of 256 for bytes"
            if tokens.name == "bytes"
            else "its folder holds another model's tokenizer"
        )
        raise UsageError(
            f"--model has a vocabulary of {vocabulary}, its tokens ({tokens.name}) need {tokens.vocabulary}; {remedy}"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and settings.seq > longest:
        raise UsageError(f"--seq {settings.seq} is longer than the model's longest sequence, {longest}")


def try_model(config: Any, settings: Settings) -> None:
    """Build the model without memory: refuses what cannot be built, and imports its code before memory is measured."""
    try:
        with torch.device("meta"):
            random_model(config, torch.float32)
    except Exception as error:  # whatever a model's own code raises
        raise UsageError(f"--model {settings.model} cannot be built as a causal LM: {_one_line(error)}") from error


def build_model(config: Any, settings: Settings) -> torch.nn.Module:
    """The model in training mode on its device; random weights depend on the seed alone."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, settings.dtype)
    torch.manual_seed(settings.seed)
    source = settings.model
    try:
        if source is not None and Path(source).is_dir():
            options = {"config": config, "dtype": dtype, "local_files_only": True}
            model = _with_sdpa(lambda **kind: AutoModelForCausalLM.from_pretrained(source, **options, **kind))
        else:
            model = random_model(config, dtype)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UsageError(f"--model {settings.model}: cannot be built: {_one_line(error)}") from error
    return model.to(device=settings.device, dtype=dtype).train()


def random_model(config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """A causal LM with this config; also works under `torch.device("meta")`."""
    from transformers import AutoModelForCausalLM

    return _with_sdpa(lambda **kind: AutoModelForCausalLM.from_config(config, dtype=dtype, **kind))


def _with_sdpa(make: Any) -> torch.nn.Module:
    try:
        return make(attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error):
            raise
        return make()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."
