"""Laws of the preparation of a draft for the Neural Engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.machine.drafts import preparation
from orchestrator.machine.drafts.preparation import Declined, Prepared, prepare
from orchestrator.machine.memory.budget import GIB


@pytest.mark.parametrize(("needed", "tried"), [(5 * GIB, True), (5 * GIB + 1, False)])
def test_core_ml_is_tried_where_it_fits_beside_all_that_the_pipeline_needs(
    needed: int, tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    facts = {"installed_version": "9", "converted_draft": tmp_path, "loaded_bytes": GIB, "_examined": Prepared()}
    facts |= {"memory_bytes": 16 * GIB, "gpu_working_set": 6 * GIB}
    for name, fact in facts.items():
        monkeypatch.setattr(preparation, name, lambda *_, fact=fact: fact)
    auto: Any = SimpleNamespace(checkpoint="draft")

    found = prepare(auto, needed, lambda _: None)

    if tried:
        assert found == Prepared()
    else:
        assert isinstance(found, Declined)
        assert "1.0 GiB beside the 5.0 GiB that the pipeline needs, which is more than the 6.0 GiB" in found.reason
