"""Install lines fit how byzpg was installed."""

import json
from typing import Any

import pytest

from byzpg import _install


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "pip install 'byzpg[live]'"),
        ({"url": "https://files.example/byzpg.whl", "archive_info": {}}, "pip install 'byzpg[live]'"),
        ({"url": "file:///a%20b/byzpg", "dir_info": {"editable": True}}, "pip install --editable '/a b/byzpg[live]'"),
        ({"url": "file:///home/me/byzpg", "dir_info": {}}, "pip install '/home/me/byzpg[live]'"),
    ],
)
def test_a_clone_installs_from_the_clone(
    origin: dict[str, Any] | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(_install, "distribution", lambda name: Installed())
    assert _install.install("live") == line
