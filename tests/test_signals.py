"""SIGINT and SIGTERM: to a process that imports, compiles, trains, and where exceptions are lost."""

import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from concurrent import futures

import pytest
import runs

from fp8jax import signals


def test_an_interrupt_that_is_lost_is_noted():
    """In a callback of the garbage collector, where an exception is printed and lost. A process of its own:
    another test may have left another handler here, or a thread in which the collector runs."""
    program = """
        import gc, signal
        from fp8jax import signals

        def interrupt(phase, info):
            gc.callbacks.remove(interrupt)
            signal.raise_signal(signal.SIGINT)

        with signals.stop_requests() as requests:
            gc.callbacks.append(interrupt)
            before = requests.asked()
            gc.collect()
            print(before, requests.asked())
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, f"0 {signal.SIGINT.value}\n"), ended.stderr
    assert "KeyboardInterrupt" in ended.stderr


def test_a_signal_asks_to_stop_and_a_second_interrupts():
    """In a process of its own, too."""
    program = """
        import signal
        from fp8jax import signals

        def interrupts():
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                return True

        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with signals.stop_requests() as requests:
            with requests.deferred():
                # A launcher repeats what the terminal sent.
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                    signal.raise_signal(number)
                    assert requests.asked() == signal.SIGTERM
                signals.SECONDS_OF_ONE_REQUEST = 0.0
                signal.raise_signal(signal.SIGTERM)
                assert interrupts()
            assert interrupts()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        print("done")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_what_a_process_ignores_it_goes_on_to_ignore():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.ends_program("a line"), signals.stop_requests() as requests:
            signal.raise_signal(signal.SIGINT)
            assert requests.asked() == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_of_the_main_thread_nothing_asks_to_stop():
    def ask():
        with signals.stop_requests() as requests, requests.deferred():
            return requests.asked(), signal.getsignal(signal.SIGTERM)

    with futures.ThreadPoolExecutor() as threads:
        assert threads.submit(ask).result() == (0, signal.getsignal(signal.SIGTERM))


def test_an_interrupt_ends_a_program_wherever_it_is():
    """Without the handler the exception is printed and lost, and the program goes on."""
    program = """
        import gc, signal, sys
        from fp8jax.train import distributed
        gc.callbacks.append(lambda phase, info: signal.raise_signal(signal.SIGINT))
        sys.exit(distributed.run_program("name", lambda: gc.collect() * 0))
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "name: interrupted; --resume goes on from the last checkpoint\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_an_import(request, number):
    """The program ends without a traceback."""
    program = request.config.rootpath / runs.PROGRAM
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    time.sleep(0.6)  # the imports take longer
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == b"" and process.returncode == -number


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_interrupt_during_an_import(request, seconds):
    """As the console script does: it imports the module of the entry point, and calls it."""
    scripts = tomllib.loads((request.config.rootpath / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["fp8jax"].split(":")
    program = f"""
        import sys
        class Tell:
            def find_spec(name, path, target=None):
                if name == "jax":
                    print("started", flush=True)
        sys.meta_path.insert(0, Tell)
        from {module} import {name}
        sys.exit({name}())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), "doctor"],
        cwd=request.config.rootpath,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"started\n"
    time.sleep(seconds)  # the imports take longer
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b"fp8jax: interrupted\n" and process.returncode == 130
