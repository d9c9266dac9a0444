"""The option of commands that open files which may name modules outside byzpg."""

from typing import Annotated, Any

import tyro


def _modules(named_by: str, note: str) -> Any:
    words = f"Modules that {named_by} may name, and whose code you trust: it is imported. {note}"
    return tyro.conf.arg(metavar="[MODULE ...]", help=words, help_behavior_hint="")


OwnModules = Annotated[
    tuple[str, ...], _modules("the opened files", "Default: modules that runs on this machine were made with.")
]
MembersModules = Annotated[tuple[str, ...], _modules("the manifest", "Example: --parts my_rules. Default: none.")]
