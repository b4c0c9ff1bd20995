"""Tensors of the trainer's state on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from consumers.trainer.learner_state import read_tensors, write_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_written_as_the_library_writes_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"{name}.{shape}": torch.randn(shape, generator=generator).to(dtype)
        for name in ("b", "a")
        for shape in ((3, 4), (7,), ())
    }
    save_file(tensors, tmp_path / "wanted", {"format": "pt"})

    write_tensors(tensors, tmp_path / "written")

    assert (tmp_path / "written").read_bytes() == (tmp_path / "wanted").read_bytes()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(tmp_path / "written").items())


def test_a_tensor_that_does_not_lie_in_one_piece_is_refused_not_written_wrongly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="non contiguous tensor: `turned`"):
        write_tensors({"turned": torch.arange(6.0).reshape(2, 3).T}, tmp_path / "written")
