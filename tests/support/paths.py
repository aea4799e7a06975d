"""Where the project and its demo models lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO_TARGET = ROOT / "target_worker" / "demo_model"
DEMO_DRAFT = ROOT / "draft_worker" / "demo_model"
