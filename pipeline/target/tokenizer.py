"""Loading a target's tokenizer: from its folder, never from a network, its code only if allowed."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pipeline.slate.files import read_json
from pipeline.target.errors import FolderError, RemoteCodeRefused
from pipeline.target.layout import read_config

_TOKENIZER_CONFIG = "tokenizer_config.json"


def load_tokenizer(folder: Path, *, remote_code: bool) -> Any:
    """The folder's transformers tokenizer.

    remote_code: whether the profile lets the folder's own Python run (setting
    target.remote_code); the code must lie in the folder. RemoteCodeRefused when it is wanted and
    not allowed, or would be fetched from elsewhere; FolderError when no tokenizer can be read.
    """
    wants_code = brings_code(folder, key="AutoTokenizer")
    if wants_code:
        require_code_allowed(folder, remote_code=remote_code, what="tokenizer")
    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=wants_code
        )
    # transformers and tokenizers raise bare exceptions of many kinds for a broken file, and Rust's
    # panics are not even an Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FolderError(
            f"{folder}: tokenizer: {type(error).__name__}: {error}",
            wanted="a whole tokenizer in the target's folder",
            next_step="check the target's folder in the profile (a damaged disk? see dmesg)",
        ) from error


def brings_code(folder: Path, *, key: str) -> bool:
    """Whether the folder maps `key` (AutoTokenizer, AutoModelForCausalLM, AutoConfig) to code."""
    return bool(_code_references(folder, key))


def require_code_allowed(folder: Path, *, remote_code: bool, what: str) -> None:
    """Passes when the profile allows the folder's code and all of it lies in the folder.

    RemoteCodeRefused else, naming the setting or the reference.
    """
    if not remote_code:
        raise RemoteCodeRefused(
            f"{folder}: the {what} brings its own Python code, which would run here",
            wanted="target.remote_code: true, once you have read that code",
            next_step="set target.remote_code to true in your profile, or use another target",
        )
    keys = ("AutoTokenizer", "AutoConfig", "AutoModel", "AutoModelForCausalLM")
    for reference in (name for key in keys for name in _code_references(folder, key)):
        module = reference.rpartition(".")[0]
        # "repository--module.Class" makes transformers fetch the code from that repository.
        if "--" in reference or not (folder / f"{module.replace('.', '/')}.py").is_file():
            raise RemoteCodeRefused(
                f"{folder}: auto_map names code outside the folder: {reference!r}",
                wanted="code that lies in the target's folder, so that its digest can be recorded",
                next_step="put the module beside config.json and name it in auto_map",
            )


def _code_references(folder: Path, key: str) -> list[str]:
    """The classes that auto_map gives for a key, in tokenizer_config.json and config.json."""
    maps = [read_config(folder).get("auto_map")]
    if (folder / _TOKENIZER_CONFIG).exists():
        content = read_json(folder / _TOKENIZER_CONFIG)
        maps.append(content.get("auto_map") if isinstance(content, dict) else None)
    references: list[str] = []
    for auto_map in maps:
        # An old spelling is a bare list [slow, fast], which is the tokenizer's.
        value = auto_map.get(key) if isinstance(auto_map, dict) else None
        if isinstance(auto_map, list) and key == "AutoTokenizer":
            value = auto_map
        values = value if isinstance(value, list) else [value]
        references += [item for item in values if isinstance(item, str)]
    return references
