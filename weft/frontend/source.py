"""Models from elsewhere: `module.py:function` of the user's, and Hugging Face configs, directories and models.

transformers is imported only when a Hugging Face model is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import CaptureError, UnknownName, WeftError, reason
from weft.frontend.capture.batches import changed, named_batch, samples_in
from weft.frontend.catalog import Batch, Field, Workload, get, ids, reals


def load(
    spec: Any, *, device: str | torch.device = "meta", dtype: torch.dtype | None = None, seed: int = 0, **settings: Any
) -> Workload:
    """A workload from a zoo name, `module.py:function`, `hf:DIRECTORY`, a Hugging Face config, or a model of theirs."""
    if spec_is_at_hand(spec):
        return _AT_HAND[spec](device=device, dtype=dtype, **settings)
    if not isinstance(spec, str):
        return hugging_face(spec, device=device, dtype=dtype, seed=seed, **settings)
    if spec.startswith("hf:"):
        return hugging_face(_config_at(spec[3:]), device=device, dtype=dtype, seed=seed, **settings)
    path, colon, function = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return user_function(Path(path), function, device=device, dtype=dtype, **settings)
    return get(spec, device=device, dtype=dtype, seed=seed, **settings)


def stamp(spec: str) -> object:
    """What changes when the file behind a spec does: what was captured of one may be remembered as long as this is the same."""
    path = Path(spec[3:]) if spec.startswith("hf:") else Path(spec.rpartition(":")[0]) if ".py:" in spec else None
    files = () if path is None else (path, path / "config.json")
    return tuple((s.st_mtime_ns, s.st_size) for f in files if f.exists() for s in (f.stat(),))


_AT_HAND: dict[str, Callable[..., Workload]] = {}


def at_hand(name: str, make: Callable[..., Workload]) -> str:
    """Let `load` find a model that a program has at hand; `make(device=, dtype=)` gives it."""
    _AT_HAND[name] = make
    return name


def spec_is_at_hand(spec: Any) -> bool:
    """Whether this names a module at hand; refused where it did in another program."""
    if not isinstance(spec, str) or not spec.startswith("module:"):
        return False
    if spec not in _AT_HAND:
        raise UnknownName(f"{spec} is not at hand", needed="the module itself, which no file says how to make", found=spec,
                          try_="weft.plan(model, loss, optimizer, batch)")  # fmt: skip
    return True


def user_function(
    path: Path, name: str, *, device: str | torch.device = "meta", dtype: torch.dtype | None = None, **settings: Any
) -> Workload:
    """Call a function of the user's file. It gives a Workload, or (model, loss, example batch)."""
    with _neighbours(path):
        return _called(path, name, device, dtype, settings)


@contextlib.contextmanager
def _neighbours(path: Path) -> Iterator[None]:
    """While a user's file is at work it finds what lies next to it first, as a script does; afterwards last, for what it imports later."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _called(path: Path, name: str, device: str | torch.device, dtype: torch.dtype | None, settings: Mapping[str, Any]) -> Workload:
    make = getattr(import_file(path), name, None)
    if not callable(make):
        raise UnknownName(
            f"{path} has no function {name!r}", needed="a function that returns (model, loss, batch)", found=name,
            try_=f"def {name}(): return model, loss, batch",
        )  # fmt: skip
    kept = torch.get_default_dtype()
    needed = "a function that returns (model, loss, batch): a torch.nn.Module, a function loss(model, batch), an example batch"
    try:
        torch.set_default_dtype(dtype or kept)
        with torch.device(device):
            made = make(**settings)
    except WeftError:
        raise
    except Exception as error:
        raise CaptureError(f"{path}:{name} raised an error", needed=needed, found=_describe_user_error(error, path)) from error
    finally:
        torch.set_default_dtype(kept)
    if isinstance(made, Workload):
        return made
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise CaptureError(f"{path}:{name} did not return (model, loss, batch)", needed=needed, found=_kind(made))
    model, loss, batch = made
    return Workload(f"{path.stem}:{name}", settings, model, *named_example(loss, batch, f"{path}:{name}"))


def _kind(made: Any) -> str:
    """What a function returned, by type; of a tuple each part's."""
    return f"({', '.join(type(x).__name__ for x in made)})" if isinstance(made, tuple) else type(made).__name__


def named_example(
    loss: Callable[[Any, Any], Tensor], batch: Any, where: str
) -> tuple[Callable[[nn.Module, Batch], Tensor], Callable[[int], dict[str, Field]], int]:
    """A loss over the named tensors of an example batch of any structure, the fields of batches like it, and how many samples it has."""
    given = {name.removeprefix("batch."): x for name, x in named_batch(batch).items()}  # as a step that is captured has them

    def own_loss(m: nn.Module, b: Mapping[str, Tensor]) -> Tensor:
        return loss(m, changed(batch, lambda name, x: b[name.removeprefix("batch.")] if isinstance(x, Tensor) else x))

    return own_loss, *batch_fields(given, where)


def batch_fields(batch: Mapping[str, Tensor], where: str) -> tuple[Callable[[int], dict[str, Field]], int]:
    """Fields of batches like an example, and how many samples it has."""
    size = _samples(batch, where)
    return _fields_like(batch, size), size


def _samples(batch: Mapping[str, Tensor], where: str) -> int:
    """How many samples an example batch has."""
    size = samples_in(x.shape for x in batch.values())
    if not size:
        needed = 'a tensor with samples first, or several in a dict, such as {"x": torch.randn(32, 64)}'
        raise CaptureError(f"the batch of {where} has no samples", needed=needed, found=", ".join(batch) or "no tensor")
    return size


def import_file(path: Path) -> Any:
    if not path.exists():
        raise UnknownName(f"no file {path}", needed="the path of a Python file before the colon", found=str(path))
    module_name = f"weft_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UnknownName(f"{path} cannot be imported", needed="a Python file", found=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CaptureError(
            f"{path} cannot be imported", needed="a Python file that runs to its end", found=_describe_user_error(error, path),
            try_='put what trains below if __name__ == "__main__":',
        ) from error
    return module


def _describe_user_error(error: Exception, path: Path) -> str:
    """What a user's file raised, and on which of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}" + (f" ({path.name}, line {line})" if line else "")


def _fields_like(batch: Mapping[str, Tensor], size: int):
    """Fields of a batch like the given one; the first dims equal to its number of samples are the batch's."""
    high = {k: int(v.max()) + 1 if v.device.type != "meta" and v.numel() else 1 for k, v in batch.items()}

    def fields(n: int) -> dict[str, Field]:
        return {
            k: Field((n, *v.shape[1:]) if v.shape[:1] == (size,) else tuple(v.shape),
                     None if v.is_floating_point() else high[k], v.dtype)
            for k, v in batch.items()
        }  # fmt: skip

    return fields


# ---- Hugging Face -----------------------------------------------------------------------------------------------


def hugging_face(
    source: Any, *, device: str | torch.device = "meta", dtype: torch.dtype | None = None, seed: int = 0,
    seq: int | None = None, batch: int = 8, weights: str | Path | None = None, **changes: Any,
) -> Workload:  # fmt: skip
    """A config or a model of transformers as a workload; `weights` names a directory of safetensors to load."""
    model = source if isinstance(source, nn.Module) else _build(source, device, dtype, seed, changes)
    if weights is not None:
        load_safetensors(model, weights)
    config = model.config
    length = seq or longest(config)
    return Workload(type(model).__name__, config, model, own_loss, lambda n: _hf_fields(model, n, length), batch)


def _of_text(config: Any) -> Any:
    """What of a config is about text: of a model that takes images too, a part of it."""
    return config if hasattr(config, "vocab_size") or not hasattr(config, "get_text_config") else config.get_text_config()


def longest(config: Any) -> int:
    """Tokens of the longest sample that a Hugging Face model takes; 0 where its config does not say."""
    text = _of_text(config)
    return int(getattr(text, "max_position_embeddings", 0) or getattr(text, "max_target_positions", 0) or 0)


def _config_at(path: str) -> Any:
    transformers = _transformers()
    place = Path(path)
    if not path or not place.exists():
        name = path.rstrip("/").rpartition("/")[2]
        raise UnknownName(f"no Hugging Face config at {path!r}", needed="a folder with a config.json, or that file: weft reads local files only",
                          found=f"no file or folder {path!r}", try_=f"hf download {path} config.json --local-dir {name}" if "/" in path else ())  # fmt: skip
    try:
        return transformers.AutoConfig.from_pretrained(place if place.is_dir() else place.parent, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UnknownName(
            f"no Hugging Face config at {path!r}", needed="a config.json with a model_type", found=_why_not(place, error),
        ) from error  # fmt: skip


def _why_not(place: Path, error: Exception) -> str:
    if place.is_dir() and not (place / "config.json").is_file():
        return f"no config.json in {str(place)!r}"
    return reason(error)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise CaptureError("Hugging Face models need transformers", needed="transformers", found="not installed",
                           try_="pip install transformers") from error  # fmt: skip
    return transformers


def _build(config: Any, device: Any, dtype: torch.dtype | None, seed: int, changes: Mapping[str, Any]) -> nn.Module:
    transformers = _transformers()
    for key, value in changes.items():
        if not hasattr(config, key):
            raise UnknownName(f"{type(config).__name__} has no field {key!r}", needed="a field of the config", found=key)
        setattr(config, key, value)
    named = [getattr(transformers, a) for a in config.architectures or [] if hasattr(transformers, a)]
    kept = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype or kept)
        with torch.device(device), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = named[0](config) if named else _by_task(transformers, config)
    finally:
        torch.set_default_dtype(kept)
    model.tie_weights()  # building without weights skips it
    return model


def _by_task(transformers: Any, config: Any) -> nn.Module:
    """The first of the usual training heads that knows this kind of config."""
    tasks = ["AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"]
    if getattr(config, "is_encoder_decoder", False):
        tasks.insert(0, tasks.pop(2))
    for task in tasks:
        head = getattr(transformers, task)
        if type(config) in head._model_mapping:
            return head.from_config(config)
    raise CaptureError(f"no training head for {type(config).__name__}", needed=" or ".join(tasks), found=type(config).__name__,
                       try_="build the model yourself and pass it, with a loss")  # fmt: skip


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss a Hugging Face model computes from `labels`; keys and values of a training step are kept for no later one."""
    cached = getattr(model.config, "use_cache", False) and "use_cache" in inspect.signature(model.forward).parameters
    return model(**batch, **({"use_cache": False} if cached else {})).loss


def _hf_fields(model: nn.Module, batch: int, seq: int) -> dict[str, Field]:
    config, takes = model.config, inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        image = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return {
            "pixel_values": reals(batch, getattr(config, "num_channels", 3), image, image),
            "labels": ids(batch, high=config.num_labels),
        }
    text = _of_text(config)
    if not hasattr(text, "vocab_size"):
        raise CaptureError(f"no batch of {type(model).__name__} is known", needed="a model of text, images or log-mel features", found=model.main_input_name,
                           try_="FILE.py:FUNCTION that returns (model, loss, batch)")  # fmt: skip
    words = ids(batch, seq or 512, high=text.vocab_size)
    if model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        return {"input_features": reals(batch, config.num_mel_bins, 2 * config.max_source_positions), "labels": words}
    found = {"input_ids": words, "labels": words}
    if "token_type_ids" in takes and getattr(config, "type_vocab_size", 0) > 1:
        found["token_type_ids"] = ids(batch, seq or 512, high=config.type_vocab_size)
    return found


def load_safetensors(model: nn.Module, directory: str | Path) -> None:
    """Load every `*.safetensors` of a directory into a model; names that do not fit are an error."""
    from safetensors.torch import load_file

    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise CaptureError(f"no weights in {directory}", needed="one or more .safetensors files", found="none")
    state: dict[str, Tensor] = {}
    for file in files:
        state.update(load_file(file))
    missing, extra = model.load_state_dict(state, strict=False, assign=True)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    tied = {k for k, v in model.state_dict().items() if any(v is w for n, w in model.named_parameters() if n != k)}
    missing = [k for k in missing if k not in tied and model.state_dict()[k].is_meta]
    if missing or extra:
        raise CaptureError(
            f"the weights in {directory} are not of this model",
            needed=", ".join(missing[:4]) or "no more names",
            found=", ".join(extra[:4]) or "nothing else",
        )
