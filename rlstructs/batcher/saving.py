"""Makes the states of a batcher, and brings it to one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlstructs.batcher import exact_format, state_dict
from rlstructs.batcher.delivery import Delivery
from rlstructs.batcher.engine import Engine
from rlstructs.batcher.exact_state import load_engine_state, take_engine_state
from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.errors import SpecError, StateError
from rlstructs.workers.interrupts import defer_first_interrupt

# The phases in which an exact state can be taken.
EXACT_PHASES = Phase.NEW, Phase.READY, Phase.RUNNING, Phase.LEASED, Phase.ENDED


def make_state(engine: Engine, life: Lifecycle, delivery: Delivery, exact: bool | str) -> dict[str, Any]:
    """Makes what `RL_Batcher.state_dict` returns."""
    life.check_open("state_dict")
    if exact not in (False, True, "best"):
        raise SpecError(f"state_dict: exact must be False, True or 'best', got {exact!r}")
    if exact is False:
        return state_dict.make_state(engine)
    life.check("state_dict", *EXACT_PHASES)
    delivery.check_handed_out("state_dict")
    with life.note_failures("state_dict", engine.is_halfway):
        found = take_engine_state(engine, exact == "best")
    if isinstance(found, Exception):
        raise found
    return state_dict.add_exact(
        state_dict.make_state(engine), exact_format.pack(engine, found, delivery.find_phase())
    )


def plan_load(engine: Engine, life: Lifecycle, state: dict[str, Any]) -> Callable[[], Callable[[], None]]:
    """Checks what `RL_Batcher.load_state_dict` is given; raises what that does, and changes nothing.

    Returns:
        A function that loads it, which runs the code of environments and agents. It returns another one, which is to be
        called last: it writes to the memory that is fed, and may find the memory restored meanwhile.
    """
    life.check("load_state_dict", Phase.NEW, Phase.READY, Phase.ENDED, Phase.INTERRUPTED)
    checked = state_dict.check(state, state_dict.make_state(engine))
    if "exact" in state:
        found, phase = exact_format.unpack(engine, state["exact"])
        load = partial(load_engine_state, engine, found)
    else:
        load, phase = partial(engine.load, checked, state_dict.unpack_statistics(checked["statistics"])), Phase.NEW

    def load_first() -> Callable[[], None]:
        with defer_first_interrupt(), life.note_failures("load_state_dict"):
            load()
        return finish

    def finish() -> None:
        with defer_first_interrupt(), life.note_failures("load_state_dict"):
            engine.write_waiting()
            life.phase = phase

    return load_first


def give_up(life: Lifecycle) -> None:
    """Has a batcher whose state was loaded in vain only be closed."""
    if life.phase is not Phase.FAILED:
        life.fail(StateError("other parts of its checkpoint were not restored"), "its checkpoint was not restored")


def check_between_rollouts(life: Lifecycle, delivery: Delivery, call: str) -> None:
    """Raises StateError while a rollout is under way or leased; ClosedError if the batcher is closed."""
    delivery.drop_lease()
    life.check(call, *(phase for phase in Phase if phase not in (Phase.RUNNING, Phase.LEASED)))
