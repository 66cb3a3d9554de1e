"""Weights of a Hugging Face checkpoint folder, read tensor by tensor into a model's parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import ConfigError

# Faults that an error lists before it only counts them.
_MOST_LISTED = 10

_FUSED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")


class CheckpointFolder:
    """The safetensors files of a folder, as `save_pretrained` and the Hub lay it out.

    Expert weights may be one tensor an expert and projection, which is how checkpoints are
    published, or one tensor a layer, which is how transformers holds them in memory. Only headers
    are read until `fill`.
    """

    def __init__(self, folder: str) -> None:
        """Raises ConfigError: no such folder, no safetensors in it, or a file that is none."""
        self.folder = folder
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"trainer.model.weights = {folder!r} holds no *.safetensors: name a folder that a "
                "Hugging Face checkpoint was downloaded or saved into"
            )
        self._files = {}
        for file in files:
            try:
                stream = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{file} cannot be read as safetensors ({error}): download or save it again"
                ) from error
            self._files |= dict.fromkeys(stream.keys(), stream)

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Refuse a checkpoint that lacks tensors of a whole model, or has others under their names.

        Args:
            shapes: of the parameters, by name.

        Raises:
            ConfigError: names what is missing or has another shape.
        """
        faults = [
            fault for name, shape in shapes.items() for fault in self._faults(name, tuple(shape))
        ]
        if faults:
            more = len(faults) - _MOST_LISTED
            listed = faults[:_MOST_LISTED] + ([f"and {more} more"] if more > 0 else [])
            raise ConfigError(
                f"trainer.model.weights = {self.folder!r} does not fit the model: "
                f"{'; '.join(listed)}. Choose the checkpoint's own preset and sizes, or download "
                "what is missing"
            )

    def fill(self, name: str, parameter: Tensor, first_expert: int = 0) -> None:
        """Copy a tensor into a parameter, cast to its dtype.

        Args:
            name: of the parameter in the model.
            parameter: whole, or for experts those of one rank: [e, ...].
            first_expert: index of the parameter's first expert.
        """
        fused = _FUSED.fullmatch(name)
        if fused is None:
            parameter.copy_(self._files[name].get_tensor(name))
        elif name in self._files:
            end = first_expert + parameter.shape[0]
            parameter.copy_(self._files[name].get_slice(name)[first_expert:end])
        else:
            for i, expert in enumerate(parameter):
                names = _expert_names(fused, first_expert + i)
                for part, source in zip(expert.chunk(len(names)), names, strict=True):
                    part.copy_(self._files[source].get_tensor(source))

    def _faults(self, name: str, shape: tuple[int, ...]) -> list[str]:
        fused = _FUSED.fullmatch(name)
        expected = {name: shape}
        if fused is not None and name not in self._files:
            num_experts, rows, columns = shape
            parts = len(_expert_names(fused, 0))
            expected = {
                source: (rows // parts, columns)
                for expert in range(num_experts)
                for source in _expert_names(fused, expert)
            }
        faults = []
        for source, want in expected.items():
            if source not in self._files:
                faults.append(f"{source} is missing")
                continue
            got = tuple(self._files[source].get_slice(source).get_shape())
            if got != want:
                faults.append(f"{source} has shape {list(got)} where {list(want)} is needed")
        return faults


def _expert_names(fused: re.Match[str], expert: int) -> list[str]:
    projections = ["down_proj"] if fused[2] == "down_proj" else ["gate_proj", "up_proj"]
    return [f"{fused[1]}{expert}.{projection}.weight" for projection in projections]
