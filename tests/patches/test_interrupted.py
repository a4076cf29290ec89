"""Killed, or struck by an error, at every single write: the next command finds the tree as it was before."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.overlay_world import World, differences, snapshot

MOST_POINTS = 400
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime", "os.chmod"}
COMPLETED = 77
STEPS = ["apply", "apply again with other rows", "revert"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("disturbance", ["kill", "error"])
def test_disturbed_at_every_write(world: World, step: str, disturbance: str) -> None:
    command, copy = prepare(world, step)
    before = snapshot(world.tree)
    strike = {"kill": kill, "error": fail}[disturbance]
    undone, complete = [], []
    for point in range(MOST_POINTS):
        status = run_child(world, command, point, strike)
        if status == COMPLETED:
            break
        assert status == (-signal.SIGKILL if disturbance == "kill" else 2), (
            f"{disturbance} at write {point} ended with {status}"
        )
        if disturbance == "kill":
            printed = world.run("status")[1]
            said_undone = f"undone: {command}, which had been killed half-way" in printed
        left = differences(before, snapshot(world.tree))
        if left:
            # Only once everything was done, and the journal that did not count any more was being deleted.
            assert world.run("status")[0] == 0
            after = f"after {disturbance} at write {point}:"
            assert not complete or complete[-1] == point - 1, (
                f"{after} undone in between; complete {complete}, now {left}"
            )
            assert_complete(world, command, after)
            complete.append(point)
            restore(world, copy)
        else:
            assert not complete, (
                f"after {disturbance} at write {point}: as before, although it was complete at {complete}"
            )
            undone += [point] if disturbance == "error" or said_undone else []
    else:
        pytest.fail("the command never came to its end")
    assert point > 25, f"only {point} writes were seen"
    assert len(undone) > 8, f"undone only after a disturbance at {undone}"
    assert complete, "no disturbance fell after the moment that counts"


def test_killed_while_undoing(world: World) -> None:
    """An undo that is killed is done again from its start."""
    prepare(world, "apply")
    before = snapshot(world.tree)
    run_child(world, "apply", 40, kill)
    assert differences(before, snapshot(world.tree)) != []
    for point in range(MOST_POINTS):
        if run_child(world, "status", point, kill) == COMPLETED:
            break
    assert point > 20, f"only {point} writes were seen"
    assert differences(before, snapshot(world.tree)) == []


def test_verify_says_so(world: World) -> None:
    run_child(world, "apply", 40, kill)
    assert "killed half-way: run `bash patch_ops.sh status`" in world.refused("verify")


def prepare(world: World, step: str) -> tuple[str, Path]:
    """The command to disturb, and a copy of the tree before it."""
    if step != "apply":
        world.must("apply")
    if step == "apply again with other rows":
        world.keep_rows("package", "kernels", "higher-limit")
    copy = world.tree.parent / "copy"
    shutil.copytree(world.tree, copy)
    return ("revert" if step == "revert" else "apply"), copy


def restore(world: World, copy: Path) -> None:
    shutil.rmtree(world.tree)
    shutil.copytree(copy, world.tree)


def assert_complete(world: World, command: str, after: str) -> None:
    """Nothing is left to do, and no journal lies there."""
    plan = world.must("plan")
    expected = "0 changes to make" if command == "apply" else "11 changes to make"
    assert expected in plan, f"{after} {plan}"
    assert [path.name for path in world.tree.glob(".*")] == [], after


def run_child(world: World, command: str, point: int, strike: Callable[[], None]) -> int:
    """Runs command in a fork and strikes at its write number point. Its status; COMPLETED when it had fewer."""
    child = os.fork()
    if child == 0:
        struck = watch_writes(world.tree, point, strike)
        try:
            status = world.run_raw(command)
            os._exit(status if struck else COMPLETED)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(99)
    status = os.waitpid(child, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def watch_writes(tree: Path, point: int, strike: Callable[[], None]) -> list[int]:
    """Python announces every call that changes the file system, whoever makes it. The list fills when struck."""
    struck: list[int] = []
    seen = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        writes = event in WRITES or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not writes or not str(arguments[0]).startswith(str(tree)) or struck:
            return
        if seen == point:
            struck.append(seen)
            strike()
        seen += 1

    sys.addaudithook(hook)
    return struck


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(28, "No space left on device")
