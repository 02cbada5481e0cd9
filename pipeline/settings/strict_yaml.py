"""YAML in which a key that stands twice is an error."""

from typing import Any

import yaml


class StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, with repeated keys refused instead of the last one winning."""


def _unique_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} stands twice", node.start_mark
            )
    return loader.construct_mapping(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
