"""A process that hangs ends itself and says where it stood."""

import subprocess
import sys

PREAMBLE = """
import ctypes, threading, time
from app.watchdog import Watchdog

def report(text, stacks):
    print(text, stacks, sep="\\n", flush=True)

def waits_for_ever():
    threading.Event().wait()

watchdog = Watchdog(1.0, "rank 3", report)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PREAMBLE + script], capture_output=True, text=True, timeout=60)


def test_a_thread_that_hangs_ends_the_process_with_its_stack() -> None:
    done = run("watchdog.alive()\nwaits_for_ever()")
    assert done.returncode == 1
    assert done.stdout.startswith("rank 3 made no step for 1 s and was ended in waits_for_ever (<string>:")
    assert "in wait" in done.stdout
    assert "was ended in waits_for_ever" in done.stderr  # the worker's log


def test_code_that_holds_the_interpreters_lock_is_in_the_log_too() -> None:
    done = run("watchdog.alive()\nctypes.PyDLL(None).sleep(5)\nwatchdog.close()")
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert 'File "<string>"' in done.stderr


def test_nothing_happens_before_the_first_step_while_steps_are_made_and_after_the_end() -> None:
    steps = "for _ in range(8):\n    watchdog.alive()\n    time.sleep(0.25)"
    done = run(f"time.sleep(1.5)\n{steps}\nwatchdog.close()\ntime.sleep(2)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_rests() -> None:
    done = run("watchdog.alive()\nwatchdog.rest()\ntime.sleep(4)\nwatchdog.close()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_report_that_fails_does_not_keep_the_process_alive() -> None:
    done = run("watchdog._report = lambda text, stacks: 1 / 0\nwatchdog.alive()\nwaits_for_ever()")
    assert done.returncode == 1


def test_a_process_with_more_to_do_is_left_to_end_itself() -> None:
    script = """
watchdog = Watchdog(1.0, "rank 0", report, ends_process=False)
watchdog.alive()
threading.Event().wait(6)
print("more")
"""
    done = run(script)
    assert done.returncode == 0
    assert done.stdout.startswith("rank 0 made no step for 1 s and was ended in <module> (<string>:")
    assert done.stdout.endswith("more\n")
