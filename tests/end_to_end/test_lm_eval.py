"""lm-evaluation-harness through `/v1/completions`, against mlx-lm's own evaluation of the same target and documents:
`pip install 'lm-eval[api]'`, then `bin/test -m slow tests/end_to_end/test_lm_eval.py`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import dequantize_model

from tests.end_to_end.test_http_serve import KEY
from tests.support.default_pair import default_pair, serving_default_pair
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CAPITALS = {
    **{"Austria": "Vienna", "Chile": "Santiago", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo"},
    **{"Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest"},
    **{"India": "New Delhi", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin", "Italy": "Rome"},
    **{"Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw"},
    **{"Portugal": "Lisbon", "Russia": "Moscow", "Spain": "Madrid", "Sweden": "Stockholm", "Syria": "Damascus"},
    **{"Thailand": "Bangkok", "Turkey": "Ankara", "Ukraine": "Kyiv"},
}
TEXTS = [part[:120] for part in (ROOT / "README.md").read_text().split("\n\n") if len(part) > 200][:12]


def _task(folder: Path, name: str, documents: Sequence[dict[str, Any]], **others: Any) -> dict[str, Any]:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    return {"task": name, **data, **others}


def _capitals(folder: Path) -> dict[str, Any]:
    """Each with four answers, the right one in turn at every place."""
    names = list(CAPITALS.values())
    documents = []
    for index, country in enumerate(CAPITALS):
        others = [names[(index + step) % len(names)] for step in (5, 11, 17)]
        others.insert(index % 4, CAPITALS[country])
        documents.append({"country": country, "choices": others, "right": index % 4})
    return _task(
        folder,
        "capitals",
        documents,
        output_type="multiple_choice",
        doc_to_text="The capital of {{country}} is",
        doc_to_choice="{{choices}}",
        doc_to_target="{{right}}",
        metric_list=[{"metric": "acc"}],
    )


def _texts(folder: Path, prefix: str) -> dict[str, Any]:
    return _task(
        folder,
        "texts",
        [{"text": prefix + text} for text in TEXTS],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}],
    )


@pytest.fixture(scope="module")
def harness() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": KEY}.items():
            patch.setenv(name, value)
        # The harness registers its own models only if no other, as mlx-lm's, has been registered before.
        pytest.importorskip("lm_eval.models")
        yield pytest.importorskip("lm_eval")


def _scores(harness: Any, model: Any, task: dict[str, Any], **options: Any) -> list[list[float]]:
    """Log-likelihoods of every document: of each choice, or of the whole text."""
    result = harness.simple_evaluate(model=model, tasks=[task], log_samples=True, bootstrap_iters=0, **options)
    samples = sorted(result["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    first = [[response[0] for response in sample["resps"]] for sample in samples]
    return [[each[0] if isinstance(each, list | tuple) else each for each in responses] for responses in first]


def test_loglikelihoods_are_those_of_mlx_lms_own_evaluation(harness: Any, tmp_path: Path):
    evaluate = pytest.importorskip("mlx_lm.evaluate")
    mx.set_default_device(mx.cpu)
    with default_pair() as pair:
        rival = evaluate.MLXLM(str(pair.target), use_chat_template=False, batch_size=1)
        # As our target computes on a processor.
        rival._model = dequantize_model(rival._model)
        rival._model.set_dtype(mx.float32)
        with serving_default_pair() as server:
            arguments = {"model": server.client.get("/v1/models").json()["data"][0]["id"]}
            arguments |= {"base_url": f"{server.url}/v1/completions", "tokenizer": str(pair.target)}
            options = {"model_args": {**arguments, "num_concurrent": 4, "max_length": 8192}}
            ours = _scores(harness, "local-completions", _capitals(tmp_path), **options)
            our_texts = _scores(harness, "local-completions", _texts(tmp_path, ""), **options)
    # The harness puts the first token before a text, mlx-lm's evaluation nothing.
    prefix = rival.tokenizer.bos_token
    theirs = _scores(harness, rival, _capitals(tmp_path))
    their_texts = _scores(harness, rival, _texts(tmp_path, prefix))

    difference = max(
        abs(a - b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)
    )
    relative = max(abs(a / b - 1) for (a,), (b,) in zip(our_texts, their_texts, strict=True))
    same = sum(_best(a) == _best(b) for a, b in zip(ours, theirs, strict=True))
    print(f"choices: {difference:.6f} nats at most, {same} of {len(ours)} the same; texts: {relative:.2e}")
    assert (len(ours), len(our_texts), same) == (len(CAPITALS), len(TEXTS), len(CAPITALS))
    assert difference < 1e-2
    assert relative < 1e-4


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)
