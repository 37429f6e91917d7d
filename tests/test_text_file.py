"""File access: bounded reads or refusals, and atomic writes, whatever happens to the writing process."""

import ast
import errno
import os
import resource
import signal
import stat
import sys
import threading
from itertools import count
from pathlib import Path

import pytest
from budget import examples
from limits import limited

import costgraph as cg
from costgraph import text_file
from costgraph.text_file import read_text, write_file

B, D = cg.dims("B D")
ROOT = Path(cg.__file__).resolve().parent


def graph(name, inputs=1):
    with cg.Graph(name) as g:
        for i in range(inputs):
            g.output(cg.relu(g.input(f"x{i}", (B, D))))
    return g


SMALL, LARGE = graph("small"), graph("large", 15)
REPORT = cg.report(SMALL, B=2, D=3)
#: Every public function that writes text, with two possible file contents.
WRITERS = {
    "save": (lambda path: cg.save(SMALL, path), lambda path: cg.save(LARGE, path)),
    "csv": (REPORT.to_csv, cg.report(LARGE, B=2, D=3).to_csv),
}
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no signals and pipes on this system")


@pytest.fixture(params=WRITERS)
def writers(request, tmp_path):
    """Return functions that write the first and the second content, and both contents."""
    first, second = WRITERS[request.param]
    contents = []
    for write in (second, first):
        write(tmp_path / "file")
        contents.append((tmp_path / "file").read_bytes())
    return first, second, contents[::-1]


# -- writing -------------------------------------------------------------------------------------------------------


def is_counted(frame, event):
    """Return whether a line belongs to the writer; the number of other lines varies, such as those of the garbage
    collector.
    """
    return event == "line" and frame.f_code.co_filename == text_file.__file__


def at_line(number, act):
    """Run a function at the n-th line from now on."""
    left = count(number, -1)

    def trace(frame, event, given):
        if is_counted(frame, event) and next(left) == 0:
            act()
        return trace

    sys.settrace(trace)


def lines_of(call):
    """Return the number of lines that a call executes."""
    ran = [0]

    def trace(frame, event, given):
        ran[0] += is_counted(frame, event)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return ran[0]


def child(act):
    """Fork, run a function in the child, and return its exit status."""
    number = os.fork()
    if number == 0:
        try:
            act()
        except cg.FormatError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(number, 0)[1]


@pytest.mark.parametrize("nth", range(4))
def test_writer_killed_at_any_line_leaves_old_or_new_content(writers, tmp_path, nth):
    first, second, contents = writers
    path = tmp_path / "file"
    total = lines_of(lambda: second(path))
    first(path)
    found = []
    for number in [*range(nth, total, 4), total]:  # the last child is not killed

        def act(number=number):
            at_line(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
            second(path)

        child(act)
        found.append(contents.index(path.read_bytes()))  # raises ValueError for any other content
    assert found == sorted(found), "the first one came back"
    assert set(found) == {0, 1}


@pytest.mark.parametrize("reason", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_writer_failing_at_any_line_leaves_no_temporary_files(writers, tmp_path, reason):
    first, second, contents = writers
    path = tmp_path / "file"
    total = lines_of(lambda: second(path))
    first(path)
    before = sys.gettrace()

    def fail():
        sys.settrace(before)  # once
        raise reason

    for number in range(total):
        try:
            at_line(number, fail)
            second(path)
        except (cg.FormatError, OSError, KeyboardInterrupt):
            pass
        finally:
            sys.settrace(before)
        assert path.read_bytes() in contents
        assert os.listdir(tmp_path) == ["file"]


def test_full_disk_keeps_old_content(writers, tmp_path):
    _, second, contents = writers
    path = tmp_path / "file"

    def act():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(contents[1]) // 2,) * 2)
        second(path)

    assert os.waitstatus_to_exitcode(child(act)) == 1  # refused
    assert path.read_bytes() == contents[0]
    assert os.listdir(tmp_path) == ["file"]


def test_whoever_reads_meanwhile_sees_one_of_the_two(writers, tmp_path):
    first, second, contents = writers
    path = tmp_path / "file"
    ready, done, odd, seen = threading.Event(), threading.Event(), [], set()

    def read():
        ready.set()
        while not done.is_set():
            found = path.read_bytes()
            seen.add(found)
            if found not in contents:
                odd.append(len(found))

    reader = threading.Thread(target=read)
    reader.start()
    ready.wait()
    try:
        for _ in range(examples(20)):
            second(path)
            first(path)
    finally:
        done.set()
        reader.join()
    assert not odd, f"{len(odd)} odd contents, of {odd[:5]} bytes"
    assert seen


def test_permissions_and_symlinks_are_preserved(tmp_path):
    old = os.umask(0o027)
    try:
        write_file(tmp_path / "new", "1")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o604)
    (tmp_path / "link").symlink_to("new")
    (tmp_path / "dangling").symlink_to("later")
    write_file(tmp_path / "link", b"2")
    write_file(str(tmp_path / "dangling"), "3")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "later", "link", "new"]
    assert all((tmp_path / name).is_symlink() for name in ("link", "dangling"))
    assert [(tmp_path / name).read_text() for name in ("new", "later")] == ["2", "3"]
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604
    write_file(tmp_path / ("n" * 255), "4")  # as long as a name can be
    (tmp_path / "new").chmod(0o444)
    if os.geteuid():  # root can write everything
        with pytest.raises(cg.FormatError, match="new: read-only, expected a file that can be written"):
            write_file(tmp_path / "new", "5")


def test_pipes_and_devices_are_written_directly(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(cg.FormatError, match=r"pipe: No such device or address, expected a file that can be written"):
        write_file(pipe, "nobody reads")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "somebody reads")
    assert os.read(reader, 100) == b"somebody reads"
    os.close(reader)
    write_file(os.devnull, "nothing is kept")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with pytest.raises(cg.FormatError, match="Is a directory"):
        write_file(tmp_path, "no file")
    if os.path.exists("/dev/full"):
        with pytest.raises(cg.FormatError, match="/dev/full: No space left on device"):
            write_file("/dev/full", "no room")


def test_redirected_stdout_is_appended_to(tmp_path):
    path = tmp_path / "out"

    def act():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1)
        os.write(1, b"before ")
        write_file("/dev/stdout" if os.path.exists("/dev/stdout") else path, "content")

    assert child(act) == 0
    assert path.read_text() == "before content"


# -- reading -------------------------------------------------------------------------------------------------------

READERS = {"load": cg.load, "hardware": cg.load_hardware, "text": lambda path: read_text(path, "here", 1000)}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_non_regular_files_are_refused_immediately(read, tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "link.toml").symlink_to("pipe.toml")
    refusals = r"no regular file|Is a directory|No such device|No such file"
    for path in (tmp_path / "pipe.toml", tmp_path / "link.toml", tmp_path, Path("/dev/zero"), Path("/dev/tty")):
        with limited(2), pytest.raises(cg.CostGraphError, match=refusals):  # the old answer was none
            read(path)


@pytest.mark.parametrize("size", [10**k for k in range(8)])
def test_oversized_files_are_not_read(size, tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(size)
    if size <= 1000:
        assert read_text(path, "here", 1000) == "\0" * size
    else:
        with pytest.raises(cg.FormatError, match="here: more than 1000 bytes, expected a text file"):
            read_text(path, "here", 1000)


def test_binary_files_are_refused(tmp_path):
    (tmp_path / "latin").write_bytes(b"abc\xe9")
    with pytest.raises(cg.SpecError, match="here: byte 3 is no UTF-8, expected a poem"):
        read_text(tmp_path / "latin", "here", 10, "a poem", cg.SpecError)
    for odd in (0, None, b"latin", "a\0b", tmp_path / "none"):
        with pytest.raises(cg.FormatError, match=r"here: .*, expected a text file"):
            read_text(odd, "here", 10)


# -- other file access ---------------------------------------------------------------------------------------------

#: Other modules that open files, and why they may.
ELSEWHERE = {
    "cli/app": "os.open of the null device",
    "report/figures": "savefig into memory",
    "report/explore/page": "parts of the page, which come with the library",
    "models/registry": "a table that comes with the library",
    "torch/calibration": "the kernel's own files",
    "torch/measurement": "the kernel's own files",
}
_OPENING = {"open", "fdopen", "write_text", "write_bytes", "read_text", "read_bytes", "savefig", "tofile"}


def test_only_text_file_opens_files():
    found = set()
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in _OPENING) else ():
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
                imported = isinstance(node.func, ast.Name) and name == "read_text"  # the function in text_file
                if name in _OPENING and not imported:
                    found.add(path.relative_to(ROOT).with_suffix("").as_posix())
    assert found - {"text_file"} == set(ELSEWHERE)
