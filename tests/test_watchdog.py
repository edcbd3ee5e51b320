"""A process that hangs ends itself and says where it stood."""

import subprocess
import sys
from pathlib import Path

PREAMBLE = """
import ctypes, subprocess, sys, tempfile, threading, time
from app.watchdog import Watchdog

def report(text, stacks):
    print(text, stacks, sep="\\n", flush=True)

def waits_for_ever():
    threading.Event().wait()

SETUP_S = 600.0
def watched(setup_timeout_s=SETUP_S, hang_timeout_s=1.0, **kept):
    watchdog = Watchdog(setup_timeout_s, hang_timeout_s, "rank 3", report, **kept)
    watchdog.start()
    return watchdog

def write(file, total):
    file.write(b"x" * total)
    file.flush()

watchdog = watched()
"""
SETUP = "watchdog.close()\nwatchdog = watched(setup_timeout_s=2.0, hang_timeout_s=600.0)\n"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREAMBLE + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def assert_ended_in(place: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 1
    assert done.stdout.startswith(f"rank 3 was ended in {place}")
    assert "its setup made no progress for 2 s (--setup-timeout-s). If it does not hang" in done.stdout


def assert_lived(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_thread_that_hangs_ends_the_process_with_its_stack() -> None:
    done = run("watchdog.step()\nwaits_for_ever()")
    assert done.returncode == 1
    assert done.stdout.startswith("rank 3 made no step for 1 s and was ended in waits_for_ever (<string>:")
    assert "in wait" in done.stdout
    assert "was ended in waits_for_ever" in done.stderr  # the worker's log


def test_code_that_holds_the_interpreters_lock_is_in_the_log_too() -> None:
    done = run("watchdog.step()\nctypes.PyDLL(None).sleep(5)\nwatchdog.close()")
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert 'File "<string>"' in done.stderr


def test_nothing_happens_before_the_first_step_while_steps_are_made_and_after_the_end() -> None:
    steps = "for _ in range(8):\n    watchdog.step()\n    time.sleep(0.25)"
    assert_lived(run(f"time.sleep(1.5)\n{steps}\nwatchdog.close()\ntime.sleep(2)"))


def test_it_rests() -> None:
    assert_lived(run("watchdog.step()\nwatchdog.rest()\nwatchdog.beat()\ntime.sleep(4)\nwatchdog.close()"))


def test_a_report_that_fails_does_not_keep_the_process_alive() -> None:
    done = run("watchdog._report = lambda text, stacks: 1 / 0\nwatchdog.step()\nwaits_for_ever()")
    assert done.returncode == 1


def test_a_process_with_more_to_do_is_left_to_end_itself() -> None:
    script = """
watchdog.close()
watchdog = watched(ends_process=False)
watchdog.step()
threading.Event().wait(6)
print("more")
"""
    done = run(script)
    assert done.returncode == 0
    assert done.stdout.startswith("rank 3 made no step for 1 s and was ended in <module> (<string>:")
    assert done.stdout.endswith("more\n")


def test_a_setup_that_hangs_ends_the_process() -> None:
    assert_ended_in("waits_for_ever (<string>:", run(f"{SETUP}waits_for_ever()"))


def test_a_setup_that_hangs_in_a_library_is_told_with_the_users_place(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "library.py"
    library.parent.mkdir()
    library.write_text("import threading\ndef fetch():\n    threading.Event().wait()\n")
    script = f"{SETUP}sys.path.insert(0, sys.argv[1])\nimport library\ndef load():\n    library.fetch()\nload()"
    done = run(script, str(library.parent))
    assert_ended_in(f"fetch ({library}:3), called from load (<string>:", done)


def test_a_rank_that_waits_for_others_in_its_setup_is_not_ended() -> None:
    done = run(f"{SETUP}with watchdog.resting():\n    time.sleep(4)\nwaits_for_ever()")
    assert_ended_in("waits_for_ever (<string>:", done)  # later


def test_signs_of_life_from_another_thread_count_in_the_setup() -> None:
    beats = "[(watchdog.beat(), time.sleep(0.25)) for _ in range(16)]"
    assert_lived(run(f"{SETUP}thread = threading.Thread(target=lambda: {beats})\nthread.start()\nthread.join()"))


# Each writes for twice the timeout.
IN_PROCESS = "write(file, 2**20)\n        time.sleep(0.2)"
IN_CHILD = (
    "subprocess.run([sys.executable, '-c', 'import sys, time\\nfor _ in range(20):\\n    "
    'open(sys.argv[1], "ab").write(b"x" * 2**20); time.sleep(0.2)\', file.name])'
)


def test_files_that_are_written_are_progress_of_the_setup() -> None:
    writing = f"with tempfile.NamedTemporaryFile() as file:\n    for _ in range(20):\n        {IN_PROCESS}"
    assert_lived(run(f"{SETUP}{writing}"))
    assert_lived(run(f"{SETUP}with tempfile.NamedTemporaryFile() as file:\n    {IN_CHILD}"))


def test_a_log_is_no_progress() -> None:
    line = "write(file, 1000)\n        time.sleep(0.01)"
    done = run(f"{SETUP}with tempfile.NamedTemporaryFile() as file:\n    while True:\n        {line}")
    assert done.returncode == 1


def test_writing_files_is_no_step() -> None:
    writing = f"with tempfile.NamedTemporaryFile() as file:\n    while True:\n        {IN_PROCESS}"
    done = run(f"watchdog.step()\n{writing}")
    assert done.returncode == 1
    assert done.stdout.startswith("rank 3 made no step for 1 s")
