# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The state machine of the rigid tracker. Only `next_state` changes the state.

INITIALISING --STARTED, FOLLOWED--> OK <--FOLLOWED-- RELOCALISED --MISSED--> LOST
     |                              |                   ^
     | FOUND (in a loaded map)      | MISSED            | FOUND, FOLLOWED
     +--------> RELOCALISED         +------> LOST ------+

docs/architecture.md has the whole diagram.
"""

import enum

from lepard_ros.tracking.track import TrackingState

INITIALISING, OK = TrackingState.INITIALISING, TrackingState.OK
LOST, RELOCALISED = TrackingState.LOST, TrackingState.RELOCALISED


class Event(enum.Enum):
    """The outcome of one cloud, or a reset."""

    RESET = "the map was cleared or loaded"
    STARTED = "the cloud became the origin of a new map"
    FOLLOWED = "the cloud was tracked; its pose continues the motion"
    MISSED = "the cloud has no pose"
    FOUND = "a search of the map found the cloud; its pose may have jumped"


TRANSITIONS: dict[tuple[TrackingState, Event], TrackingState] = {
    (INITIALISING, Event.STARTED): OK,
    (INITIALISING, Event.FOLLOWED): OK,
    (INITIALISING, Event.MISSED): INITIALISING,
    (INITIALISING, Event.FOUND): RELOCALISED,
    (OK, Event.FOLLOWED): OK,
    (OK, Event.MISSED): LOST,
    (OK, Event.FOUND): RELOCALISED,
    (LOST, Event.FOLLOWED): RELOCALISED,
    (LOST, Event.MISSED): LOST,
    (LOST, Event.FOUND): RELOCALISED,
    (RELOCALISED, Event.FOLLOWED): OK,
    (RELOCALISED, Event.MISSED): LOST,
    (RELOCALISED, Event.FOUND): RELOCALISED,
}


def next_state(state: TrackingState, event: Event) -> TrackingState:
    """The state after an event. A reset always leads to INITIALISING; a pair missing from the table is a bug."""
    return INITIALISING if event is Event.RESET else TRANSITIONS[state, event]
