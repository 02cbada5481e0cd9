"""YAML for people: a key that stands twice is an error, and no short text becomes a huge value."""

import contextlib
from collections import Counter
from typing import Any

import yaml

from pipeline.settings.strict_json import MAX_NESTING

MOST_BYTES = 1 << 20
"""Of a file that people write."""
_MOST_VALUES = 100_000


class StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, with repeated keys refused instead of the last one winning."""

    def get_single_node(self) -> yaml.Node | None:
        """The document, unless its aliases stand for too many values, or for themselves."""
        node = super().get_single_node()
        if node is not None and _count(node, {}) > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MOST_VALUES} values", node.start_mark
            )
        return node


def load_yaml(text: str) -> Any:
    """A YAML document as plain values. yaml.YAMLError for whatever is not one."""
    depth = 0
    for character in text:  # PyYAML needs minutes to find out that it cannot go so deep
        depth += (character in "[{") - (character in "]}")
        if depth > MAX_NESTING:
            raise yaml.YAMLError(f"nested deeper than {MAX_NESTING} levels")
    try:
        return yaml.load(text, Loader=StrictLoader)  # noqa: S506  a safe loader
    except yaml.YAMLError:
        raise
    # `!!int x`, the 31st of February, thousands of brackets: PyYAML lets what Python says through.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node, those behind an alias each time that it stands there."""
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1  # met again below itself
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        known[id(node)] = 1 + sum(_count(child, known) for child in children)
    return known[id(node)]


def _unique_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    with contextlib.suppress(TypeError):  # a key that is a list: the next line refuses it
        for key, times in Counter(keys).items():
            if times > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", node.start_mark
                )
    return loader.construct_mapping(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
