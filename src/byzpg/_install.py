"""How to install what some features need."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install(extra: str) -> str:
    """The command that installs an extra from where byzpg itself came: a clone, or a package index."""
    try:
        origin = json.loads(distribution("byzpg").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if "dir_info" not in origin:
        return f"pip install 'byzpg[{extra}]'"
    editable = "--editable " * origin["dir_info"].get("editable", False)
    clone = url2pathname(urlsplit(origin["url"]).path)
    return f"pip install {editable}{shlex.quote(f'{clone}[{extra}]')}"
