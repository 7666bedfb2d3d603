"""Says what a path holds: a safetensors checkpoint, a Strata pack, or something that is not read.

Lives in ``checkpoint`` because only this room knows file formats. Everything a user may point at by
mistake is recognised from a few bytes and names, so that the refusal is one line that says what the
thing is and what is read instead. It must not know any model family, and never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from strata.errors import CheckpointError
from strata.files import NotRegularError, open_regular, read_regular
from strata.paths import expanded

__all__ = ["Kind", "Recognised", "find_checkpoint", "find_pack", "naming_config", "recognise", "unreadable"]

PACK_FORMAT_NAME = "strata-pack"
MANIFEST_FILE = "manifest.json"
UNFINISHED_SUFFIX = ".unfinished"

READS = (
    "Strata reads a Hugging Face checkpoint folder (config.json and *.safetensors in BF16, F16, F32 or NVFP4) "
    "or a Strata pack"
)


class Kind(Enum):
    """What a path was found to be. Only the first two can be read."""

    SAFETENSORS = "a safetensors checkpoint"
    PACK = "a Strata pack"
    UNFINISHED_PACK = "an unfinished Strata pack"
    GGUF = "a GGUF file"
    OLLAMA = "an Ollama store"
    QUANTISED = "a quantised checkpoint of a kind that is not read"
    FOREIGN = "another engine's model"
    PICKLE = "a PyTorch pickle checkpoint"
    NO_CONFIG = "a folder of safetensors without its config.json"
    NO_WEIGHTS = "a model folder without weights"
    EMPTY = "an empty folder"
    ABSENT = "absent"
    UNKNOWN = "not a model that Strata knows"


@dataclass(frozen=True)
class Recognised:
    """``detail`` is a phrase that completes "PATH ..."; ``hint`` the way out when the kind cannot be read."""

    path: Path
    kind: Kind
    detail: str
    hint: str = ""

    def refuse(self) -> CheckpointError:
        """The one-line error for a path that cannot be read."""
        return CheckpointError(f"{self.path} {self.detail}", self.hint or READS)


# quantization_config.quant_method of formats whose expert weights are not stored as Strata computes them.
_REFUSED_METHODS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "quanto": "Quanto",
    "torchao": "torchao",
    "auto-round": "AutoRound",
    "mxfp4": "MXFP4",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "higgs": "HIGGS",
    "bitnet": "BitNet",
}
_READ_COMPRESSED = {"nvfp4-pack-quantized", "float-quantized", "mixed-precision", "dense", "naive-quantized"}
_READ_MODELOPT = {"NVFP4", "MIXED_PRECISION", "W4A16_NVFP4", "NVFP4_FP8_MHA", ""}

# A file name that only one kind of engine writes, and what wrote it.
_FOREIGN_FILES = {
    "mlc-chat-config.json": "an MLC model",
    "ndarray-cache.json": "an MLC model",
    "rank0.engine": "a TensorRT-LLM engine",
    "openvino_model.xml": "an OpenVINO model",
    "model.onnx": "an ONNX model",
    "genai_config.json": "an ONNX Runtime model",
    "flax_model.msgpack": "a Flax checkpoint",
    "tf_model.h5": "a TensorFlow checkpoint",
    "params.json": "an original-format checkpoint (params.json)",
}
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


def recognise(path: str | Path) -> Recognised:
    """Looks at ``path`` without reading weights. Raises only if the operating system refuses the look."""
    path = expanded(path)
    try:
        if not path.exists():
            return Recognised(path, Kind.ABSENT, "does not exist", f"give the path of a folder; {READS}")
        if path.is_dir():
            return _recognise_folder(path)
        if not path.is_file():  # opening a pipe would wait for its writer, reading a device might never end
            return Recognised(path, Kind.UNKNOWN, "is neither a folder nor a regular file")
        return _recognise_file(path)
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The one-line error for a file or folder that the operating system does not let be read, with the way out."""
    hint = "look at the file and the disk that it lies on"
    if isinstance(error, NotRegularError):
        hint = "put the file itself in its place"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = "give this user the right to read it, and to enter the folders above it"
    elif error.errno == errno.ENAMETOOLONG:
        hint = f"give the path of a folder; {READS}"
    return CheckpointError(f"{path} cannot be read: {error.strerror}", hint)


@contextlib.contextmanager
def naming_config(folder: Path, name: str = "config.json") -> Iterator[None]:
    """A family's refusal of a config says 'config.json'; here it becomes the path of this folder's own, ``name``."""
    try:
        yield
    except CheckpointError as error:
        if not error.message.startswith("config.json"):
            raise
        raise CheckpointError(f"{folder / name}{error.message[len('config.json') :]}", error.hint) from error


def find_checkpoint(path: str | Path) -> Path:
    """The folder of a safetensors checkpoint, or the one-line refusal of whatever else is there."""
    found = recognise(path)
    if found.kind is Kind.PACK:
        raise CheckpointError(
            f"{found.path} is a Strata pack already", "use it as it is, or give the checkpoint it was made from"
        )
    if found.kind is not Kind.SAFETENSORS:
        raise found.refuse()
    return found.path


def find_pack(path: str | Path) -> Path:
    """The folder of a Strata pack, or the one-line refusal of whatever else is there."""
    found = recognise(path)
    if found.kind is Kind.SAFETENSORS:
        raise CheckpointError(
            f"{found.path} is a Hugging Face checkpoint, not a pack",
            f"make a pack of it: strata pack {found.path} PACK",
        )
    if found.kind is not Kind.PACK:
        raise found.refuse()
    return found.path


def _recognise_file(path: Path) -> Recognised:
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(64)
    if start[:4] in (b"GGUF", b"FUGG"):
        if path.name.startswith("sha256-"):
            return _ollama(path)
        return _gguf(path)
    if start[:4] in (b"ggml", b"lmgg", b"tjgg"):
        return Recognised(path, Kind.FOREIGN, "is an old GGML file, which is not read")
    if path.suffix == ".safetensors" or (path.parent / MANIFEST_FILE).is_file():
        return Recognised(path, Kind.UNKNOWN, "is one file of a model", f"give its folder: {path.parent}; {READS}")
    if start[:2] in (b"PK", b"\x80\x02", b"\x80\x04") or path.suffix in _PICKLE_SUFFIXES:
        return _pickle(path)
    return Recognised(path, Kind.UNKNOWN, "is a file of an unknown kind")


def _recognise_folder(path: Path) -> Recognised:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return Recognised(path, Kind.EMPTY, "is an empty folder")
    if path.name.endswith(UNFINISHED_SUFFIX):
        return _unfinished(path)
    if MANIFEST_FILE in names:
        return _recognise_manifest(path)
    if "blobs" in names and ("manifests" in names or _has_prefix(path / "blobs", "sha256-")):
        return _ollama(path)
    if "models" in names and (path / "models" / "blobs").is_dir() and (path / "models" / "manifests").is_dir():
        return _ollama(path)
    if "snapshots" in names and (path / "snapshots").is_dir():
        inside = next(iter(sorted((path / "snapshots").iterdir())), path / "snapshots")
        return Recognised(
            path, Kind.UNKNOWN, "is a download cache, not a model", f"give the folder inside of it: {inside}"
        )
    safetensors = [name for name in names if name.endswith(".safetensors")]
    for name, what in _FOREIGN_FILES.items():
        if name in names and not safetensors:
            return Recognised(path, Kind.FOREIGN, f"is {what} ({name}), which is not read")
    if safetensors:
        if "config.json" not in names:
            return Recognised(
                path,
                Kind.NO_CONFIG,
                f"holds {safetensors[0]} but no config.json",
                "put the config.json of the checkpoint beside its safetensors",
            )
        return _recognise_config(path) or Recognised(path, Kind.SAFETENSORS, "is a safetensors checkpoint")
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    if gguf:
        return _gguf(path / gguf)
    pickle = next((name for name in names if Path(name).suffix in _PICKLE_SUFFIXES), None)
    if pickle:
        return _pickle(path / pickle)
    if "config.json" in names or "model.safetensors.index.json" in names:
        # The config first: weights that would not be read need not be fetched.
        refused = _recognise_config(path, has_weights=False) if "config.json" in names else None
        return refused or Recognised(
            path, Kind.NO_WEIGHTS, "has no *.safetensors", "the download may be unfinished; fetch it again"
        )
    return Recognised(path, Kind.UNKNOWN, f"is a folder without a model (it holds {_some(names)})")


def _recognise_manifest(path: Path) -> Recognised:
    manifest = _read_json(path / MANIFEST_FILE)
    if isinstance(manifest, dict) and manifest.get("format") == PACK_FORMAT_NAME:
        return Recognised(path, Kind.PACK, "is a Strata pack")
    if manifest is None:
        return Recognised(
            path,
            Kind.UNKNOWN,
            f"has a {MANIFEST_FILE} that is not JSON",
            "the pack is damaged: make it again with strata pack",
        )
    return Recognised(
        path,
        Kind.FOREIGN,
        f"is another engine's pack ({MANIFEST_FILE} does not say {PACK_FORMAT_NAME!r})",
        f"give the checkpoint it was made from; {READS}",
    )


def _recognise_config(path: Path, *, has_weights: bool = True) -> Recognised | None:
    """Why the folder's config.json says that its weights cannot be read; None where it does not.

    FP8 is for the tensors to decide, where there are some: it is read in all but experts.
    """
    config = _read_json(path / "config.json")
    if not isinstance(config, dict):
        return Recognised(
            path,
            Kind.NO_CONFIG,
            "has a config.json that is not a JSON object",
            "fetch config.json of the checkpoint again",
        )
    refused = refused_quantisation(config, _read_json(path / "hf_quant_config.json"))
    if not refused and not has_weights and _experts_in_fp8(config):
        refused = "an FP8 checkpoint, experts included"
    if refused:
        return Recognised(
            path,
            Kind.QUANTISED,
            f"is {refused}, which is not read",
            "use the BF16 checkpoint or an NVFP4 one (compressed-tensors or ModelOpt) of the same model",
        )
    return None


def refused_quantisation(config: dict[str, Any], modelopt: Any = None) -> str:
    """A phrase for a quantisation that is not read, or "" (none, NVFP4, or one that the tensors decide)."""
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if quantisation is None and isinstance(config.get("text_config"), dict):
        quantisation = config["text_config"].get("quantization_config")
    if quantisation is None and isinstance(config.get("quantization"), dict) and "group_size" in config["quantization"]:
        bits = config["quantization"].get("bits", "?")
        return f"an MLX checkpoint ({bits} bits)"
    if quantisation is None and isinstance(modelopt, dict) and isinstance(modelopt.get("quantization"), dict):
        quantisation = {"quant_method": "modelopt", **modelopt["quantization"]}
    if not isinstance(quantisation, dict):
        return ""
    method = str(quantisation.get("quant_method", "")).lower()
    if method in _REFUSED_METHODS:
        return f"{_article(_REFUSED_METHODS[method])} checkpoint"
    if method == "compressed-tensors":
        written = str(quantisation.get("format", "dense"))
        return "" if written in _READ_COMPRESSED else f"a compressed-tensors checkpoint of format {written!r}"
    if method == "modelopt":
        algorithm = str(quantisation.get("quant_algo") or "")
        return "" if algorithm.upper() in _READ_MODELOPT else f"a ModelOpt checkpoint of algorithm {algorithm!r}"
    if method == "fp8":
        return ""
    return f"a checkpoint quantised by {method or 'an unnamed method'!r}"


def _experts_in_fp8(config: dict[str, Any]) -> bool:
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, dict) or str(quantisation.get("quant_method", "")).lower() != "fp8":
        return False
    return "expert" not in str(quantisation.get("modules_to_not_convert"))


def _gguf(path: Path) -> Recognised:
    return Recognised(
        path,
        Kind.GGUF,
        "is a GGUF file, which is not read",
        f"give the safetensors checkpoint of the same model; {READS}",
    )


def _ollama(path: Path) -> Recognised:
    return Recognised(
        path,
        Kind.OLLAMA,
        "belongs to an Ollama store (GGUF blobs), which is not read",
        f"give the safetensors checkpoint of the same model; {READS}",
    )


def _pickle(path: Path) -> Recognised:
    return Recognised(
        path,
        Kind.PICKLE,
        "is a PyTorch pickle, which can run code when it is opened and is not read",
        f"give the safetensors version of the checkpoint; {READS}",
    )


def _unfinished(path: Path) -> Recognised:
    return Recognised(
        path,
        Kind.UNFINISHED_PACK,
        "is a pack whose making was interrupted",
        "run the same strata pack command again; it starts clean",
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_regular(path))
    except (FileNotFoundError, NotRegularError, ValueError, RecursionError):
        return None


def _has_prefix(folder: Path, prefix: str) -> bool:
    return folder.is_dir() and any(entry.name.startswith(prefix) for entry in folder.iterdir())


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEHM' else 'a'} {name}"


def _some(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
