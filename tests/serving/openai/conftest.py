"""The tiny pair with tools, loaded once for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.openai.model import SERVING, load_with_tools, served
from tests.serving.site import Site, serving
from trt_eagle3.decode.llm import LLM
from trt_eagle3.serving.served_model import ServedModel


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    engine = load_with_tools(tmp_path_factory.mktemp("tools"), limits={"max_batch_size": 4})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model(engine: LLM) -> ServedModel:
    return served(engine)


@pytest.fixture(scope="module")
def site(engine: LLM) -> Iterator[Site]:
    with serving(engine, SERVING) as site:
        yield site
