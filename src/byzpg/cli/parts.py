"""The option of commands that open files which may name modules outside byzpg."""

from typing import Annotated

import tyro

OwnModules = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="[MODULE ...]",
        help="Modules that the opened files may name, and whose code you trust: it is imported. Default: modules that "
        "runs on this machine were made with.",
        help_behavior_hint="",
    ),
]
MembersModules = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="[MODULE ...]",
        help="Modules that the manifest may name, and whose code you trust: it is imported. Example: --parts my_rules. "
        "Default: none.",
        help_behavior_hint="",
    ),
]
