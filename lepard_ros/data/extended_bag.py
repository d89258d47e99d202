# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A copy of a rosbag2 with additional topics."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lepard_ros.data.bag_reader import TF, Bag
from lepard_ros.data.bag_writer import import_rosbags, reliable_qos
from lepard_ros.errors import InputError


class ExtendedBag:
    """Copies the messages of a bag in order and inserts others. Close it, or the bag has no index."""

    def __init__(self, path: Path, source: Bag, definitions: Mapping[str, str], taken: str) -> None:
        """Open a new mcap bag. definitions: text of messages that no ROS distribution knows, by type name.

        taken: where the further topics lie. The source's own there are left out, and its transforms, under which a
        frame would get two parents.
        """
        if path.exists():
            raise InputError(f"{path} exists already; name a new bag or remove it first.")
        if source.is_ros1():
            raise InputError(
                f"{source.path} is a ROS 1 bag, which --mcap cannot copy; rosbags-convert turns it into one."
            )
        rosbags = import_rosbags()
        self._store = rosbags.typesys.get_typestore(rosbags.typesys.Stores.ROS2_JAZZY)
        for name, text in definitions.items():
            self._store.register(rosbags.typesys.get_types_from_msg(text, name))
        plugin = rosbags.rosbag2.StoragePlugin.MCAP
        self._writer = rosbags.rosbag2.Writer(path, version=9, storage_plugin=plugin)
        self._writer.open()
        self._connections: dict[Any, Any] = {}
        self._source = source.raw_messages(lambda topic, kind: kind != TF and not topic.startswith(taken))
        self._next = next(self._source, None)

    def put(self, topic: str, kind: str, latched: bool, data: bytes, recorded_ns: int) -> None:
        """Write a further message, after all of the source up to this time."""
        self._copy(recorded_ns)
        if topic not in self._connections:
            self._connections[topic] = self._writer.add_connection(
                topic, kind, typestore=self._store, offered_qos_profiles=[reliable_qos(latched)]
            )
        self._writer.write(self._connections[topic], recorded_ns, data)

    def close(self) -> None:
        """Copy what is left of the source, write the index and close the files."""
        self._copy(None)
        self._writer.close()

    def _copy(self, until_ns: int | None) -> None:
        """Copy messages of the source, byte by byte, up to a time of recording or to the end."""
        while self._next is not None and (until_ns is None or self._next[1] <= until_ns):
            connection, recorded_ns, data = self._next
            self._writer.write(self._copied(connection), recorded_ns, data)
            self._next = next(self._source, None)

    def _copied(self, connection: Any) -> Any:
        key = connection.topic, connection.id
        if key not in self._connections:
            self._connections[key] = self._writer.add_connection(
                connection.topic,
                connection.msgtype,
                msgdef=connection.msgdef.data or None,
                rihs01=connection.digest or None,
                typestore=self._store,
                serialization_format=connection.ext.serialization_format,
                offered_qos_profiles=connection.ext.offered_qos_profiles,
            )
        return self._connections[key]
