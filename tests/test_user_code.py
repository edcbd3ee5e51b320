"""The user's own models and data sets, and all that can be wrong with them, as --dry-run sees it."""

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.config import Config
from app.errors import BadInput
from app.preflight import check
from app.runs import resolved
from app.user_code import MOST_MIB, find_callable, import_own, packed

GOOD_DATA = """
import numpy as np
import torch
from app.data.splits import from_arrays

LABELS = np.arange(40) % 4
IMAGES = torch.zeros(40, 3, 8, 8, dtype=torch.uint8)

def arrays(images=IMAGES, labels=LABELS, **changes):
    options = dict(val_fraction=0.2, class_names=("a", "b", "c", "d"), mean=(0.5,) * 3, std=(0.2,) * 3)
    return from_arrays((images, labels), **{**options, **changes})

def load(config):
    return arrays()
"""
GOOD_NET = """
import torch
from torch import nn

class Wrapped(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        channels, height, width = input_shape
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes))

    def forward(self, images):
        return self.net(images)

def build(num_classes, input_shape):
    return Wrapped(num_classes, input_shape)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory that the command is started in; what is imported from it is forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(
            getattr(sys.modules[name], "__file__", None) or getattr(sys.modules[name], "__path__", "")
        ):
            del sys.modules[name]


def dry_run(start: Path, data: str = "", net: str = "", **settings) -> str:
    """What --dry-run says is wrong."""
    (start / "own_data.py").write_text(GOOD_DATA + textwrap.dedent(data))
    (start / "own_net.py").write_text(GOOD_NET + textwrap.dedent(net))
    own = {"dataset": "own_data:load", "model": "own_net:build", "batch_size": 8, "tracking_uri": "none"}
    with pytest.raises(BadInput) as caught:
        check(resolved(Config(**{**own, **settings})), verbose=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("import no_such_library", "--dataset own_data:load: No module named 'no_such_library' ({}, line"),
        ("1 / 0", "importing own_data failed: ZeroDivisionError: division by zero ({}, line"),
        ("def load(config:", "importing own_data failed: SyntaxError: '(' was never closed (own_data.py, line"),
        ("raise SystemExit(3)", "importing own_data failed: SystemExit: 3"),
        ("load = None", "is an object of type NoneType: it must be a function or a class, which is called with config"),
        ("del load", "has no load"),
        ("def load(): pass", "is called with config, which it does not take: got an unexpected keyword argument"),
        ("def load(config): raise KeyError('column')", "--dataset own_data:load: KeyError: 'column' ({}, line"),
        ("def load(config): raise SystemExit", "--dataset own_data:load: SystemExit ({}, line"),
        ("def load(config): return IMAGES, LABELS", "it returned tuple: it must return app.data.splits.Splits"),
        ("async def load(config): return 1", "it returned coroutine: it must return app.data.splits.Splits"),
        (
            "from_arrays((IMAGES, LABELS), val_fraction=0.1, mean=(0.5,), std=(0.5,))",
            "missing 1 required keyword-only argument: 'class_names' ({}, line",
        ),
        ("arrays(class_names='abcd')", "class_names is 'abcd': it must be a tuple of two or"),
        ("arrays(class_names=('a',))", "class_names is ('a',): it must be a tuple of two or"),
        ("arrays(class_names=('a',) * 4)", "two or more different str"),
        ("arrays(class_names=range(4))", "two or more different str"),
        ("arrays(class_names=None)", "TypeError: 'NoneType' object is not iterable"),
        ("arrays(class_names=('a', 'b', 'c'))", "the labels of train go from 0 to 3: with 3"),
        (
            "arrays(labels=LABELS + 1)",
            "go from 1 to 4: with 4 class_names they must be 0 to 3",
        ),
        ("arrays(labels=LABELS - 1)", "go from -1 to 2"),
        ("arrays(labels=LABELS / 1)", "are float64 of shape (40,): they must be integers of"),
        ("arrays(labels=LABELS == 1)", "are bool of shape (40,)"),
        ("arrays(labels=np.eye(4, dtype=int)[LABELS])", "are int64 of shape (40, 4)"),
        ("arrays(labels=LABELS[:39])", "of shape (39,): they must be integers of shape (40,)"),
        ("arrays(labels=['a'] * 40)", "are <U1 of shape (40,)"),
        ("arrays(images=IMAGES.numpy())", "torch.from_numpy makes one of a NumPy array"),
        ("arrays(images=IMAGES.double())", "are torch.float64 of shape (40, 3, 8, 8) on cpu"),
        ("arrays(images=IMAGES[:, 0, 0, 0])", "are torch.uint8 of shape (40,)"),
        ("arrays(images=IMAGES[:0], labels=LABELS[:0])", "not empty"),
        ("arrays(images=IMAGES.to('meta'))", "on meta: they must be"),
        (
            "arrays(images=IMAGES.permute(0, 2, 3, 1))",
            "for each of the 8 channels; the images' shape (C, H, W) is (8, 8, 3)",
        ),
        ("arrays(images=IMAGES.float())", "mean, std and image_size are for images, not for torch.float32"),
        ("arrays(images=IMAGES.float() / 0, mean=(), std=())", "the samples of train have NaN or infinite numbers"),
        ("arrays(mean=0.5)", "mean is 0.5: it must have a finite number"),
        (
            "arrays(std=(0.2, 0, 0.2))",
            "std is (0.2, 0, 0.2): it must have a finite number above",
        ),
        ("arrays(mean=(float('nan'),) * 3)", "mean is (nan, nan, nan)"),
        ("arrays(mean=('a', 'b', 'c'))", "mean is ('a', 'b', 'c')"),
        (
            "arrays(val=(IMAGES[:, :, :4], LABELS))",
            "the samples of val are torch.uint8 of shape (N, 3, 4, 8), those of train torch.uint8",
        ),
        ("arrays(test=IMAGES)", "test is a Tensor: it must be a pair (samples, labels)"),
        (
            "arrays(val_fraction=1.5)",
            "val_fraction is 1.5: without val it must be between 0 and 1",
        ),
        ("from_arrays(None)", "--dataset own_data:load: TypeError"),
        (
            "def load(config):\n    s = arrays()\n    s.val.labels[0] = 9\n    return s",
            "--dataset own_data:load: val.labels go from 0 to 9",
        ),
        (
            "def load(config):\n    s = arrays()\n    s.val.labels = [0] * 8\n    return s",
            "val.labels must be an int64 NumPy array of shape (N,)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_data_set_gone_wrong_is_told(data: str, message: str, start: Path) -> None:
    if data.startswith(("arrays(", "from_arrays(")):
        data = f"def load(config): return {data}"
    assert message.format(start / "own_data.py") in dry_run(start, data=data)
    gc.collect()  # a coroutine that nobody waits for warns when it goes, which may be in another test


@pytest.mark.parametrize(
    ("net", "message"),
    [
        ("from torch import no_such_name", "importing own_net failed: ImportError: cannot import name 'no_such_name'"),
        (
            "build = nn.Linear(2, 2)",
            "is an object of type Linear: it must be a function or a class",
        ),
        ("build = {'a': 1}", "is an object of type dict"),
        ("def build(classes): pass", "is called with num_classes and input_shape, which it does not take"),
        ("def build(num_classes, input_shape, width): pass", "missing a required argument: 'width'"),
        ("build = nn.Linear", "is called with num_classes and input_shape, which it does not take"),
        ("def build(num_classes, input_shape): return Wrapped", "it returned type: it must return a torch.nn.Module"),
        ("def build(num_classes, input_shape): pass", "it returned NoneType: it must return a torch.nn.Module"),
        ("def build(num_classes, input_shape): raise OSError('no file')", "OSError: no file ({}, line"),
        (
            "nn.DataParallel(Wrapped(num_classes, input_shape))",
            "it returned a DataParallel: return what is in it, .module",
        ),
        (
            "Wrapped(5, input_shape)",
            "gives (2, 5) for 2 images of 3x8x8: expected",
        ),
        (
            "lambda self, x: (self.net(x), x)",
            "gives tuple for 2 images of 3x8x8: expected logits (2, 4)",
        ),
        ("lambda self, x: self.net(x).argmax(1)", "gives (2,) for 2 images of 3x8x8"),
        ("lambda self, x: self.net(x).round().long()", "gives torch.int64 for images"),
        ("lambda self, x: self.net(x) / 0", "gives NaN or infinite logits for images"),
        ("lambda self, x: {}['key']", "KeyError: 'key' ({}, line"),
        (
            "lambda self, x: self.missing",
            "AttributeError: 'Wrapped' object has no attribute 'missing'",
        ),
        ("Wrapped.forward = lambda self: 1", "does not take images of 3x8x8: TypeError"),
        (
            "lambda self, x: self.net[1](x.view(len(x), -1))",
            "Use .reshape(...) instead. ({}, line",
        ),
        ("lambda self, x: self.net(x).detach()", "no gradient comes from its logits"),
        (
            "lambda self, x: (self.net(x), x) if self.training else self.net(x)",
            "it gives tuple in training mode: it must give logits, as in evaluation",
        ),
        (
            "lambda self, x: self.net(x) * (float('nan') if self.training else 1)",
            "the loss is nan before the first step",
        ),
        (
            "lambda self, x: self.net(x)[:, :2] if self.training else self.net(x)",
            "training on a batch of (8, 3, 8, 8): IndexError",
        ),
        ("Wrapped(num_classes, input_shape).double()", "has parameters of torch.float64"),
        ("Wrapped(num_classes, input_shape).to('meta')", "returned a network on meta: leave it on the CPU"),
        (
            "Wrapped(num_classes, input_shape).requires_grad_(False)",
            "returned a network without a parameter to train",
        ),
    ],
)
def test_a_model_gone_wrong_is_told(net: str, message: str, start: Path) -> None:
    if net.startswith(("Wrapped(", "nn.")):
        net = f"def build(num_classes, input_shape): return {net}"
    elif net.startswith("lambda"):
        net = f"Wrapped.forward = {net}"
    said = dry_run(start, net=net)
    assert said.startswith("--model own_net:build")
    assert message.format(start / "own_net.py") in said


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_such_module:build", "No module named 'no_such_module'; it is looked for from {} and on PYTHONPATH"),
        ("own_net.py:build", "write own_net:build, without .py"),
        ("own_net.deeper:build", "No module named 'own_net.deeper'; 'own_net' is not a package"),
        ("own_net:missing", "own_net ({}/own_net.py) has no missing"),
    ],
)
def test_a_name_that_leads_nowhere(model: str, message: str, start: Path) -> None:
    assert f"--model {model}: {message.format(start)}" in dry_run(start, model=model)


def test_exit_code_2_one_line_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "own_net.py").write_text("def build(num_classes, input_shape):\n    return open('missing.pt')\n")
    words = ["--model", "own_net:build", "--dry-run", "--tracking-uri", "none"]
    done = subprocess.run(
        [sys.executable, "-m", "app.train", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    reason = "FileNotFoundError: [Errno 2] No such file or directory: 'missing.pt'"
    assert done.stderr == f"error: --model own_net:build: {reason} ({tmp_path}/own_net.py, line 2)\n"


@pytest.mark.parametrize("attribute", ["build", "Wrapped", "short", "partial"])
def test_functions_classes_lambdas_and_partials_are_called(attribute: str, start: Path) -> None:
    more = "from functools import partial as p\nshort = lambda **sizes: build(**sizes)\npartial = p(build)\n"
    (start / "own_net.py").write_text(GOOD_NET + more)
    import_own(Config(model=f"own_net:{attribute}"))
    build = find_callable("--model", f"own_net:{attribute}", "num_classes", "input_shape")
    assert build(num_classes=2, input_shape=(1, 2, 2)).training


def make_package(start: Path) -> Config:
    """A package with data beside it, a module that it imports, and one that nobody imports."""
    (start / "nets" / "deep").mkdir(parents=True)
    (start / "nets" / "__init__.py").write_text("")
    (start / "nets" / "deep" / "net.py").write_text("import widths\nfrom nets.deep import sizes\n" + GOOD_NET)
    (start / "nets" / "deep" / "sizes.py").write_text("")
    (start / "nets" / "names.txt").write_text("a file that the package reads")
    (start / "nets" / ".git").mkdir()
    (start / "nets" / ".git" / "big").write_bytes(bytes(100))
    (start / "widths.py").write_text("WIDTH = 3")
    (start / "other.py").write_text("")
    (start / "runs").mkdir()
    (start / "runs" / "checkpoint").write_bytes(bytes(100))
    config = Config(model="nets.deep.net:build")
    import_own(config)
    return config


def test_what_is_sent_is_the_code_that_was_imported_and_not_the_directory(start: Path) -> None:
    with packed(make_package(start)) as paths:
        folders = {Path(path).parent for path in paths}
        assert len(folders) == 1
        folder = folders.pop()
        sent = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert sent == {
        "nets/.nets",  # tells packages of the same content apart
        "nets/__init__.py",
        "nets/deep/net.py",
        "nets/deep/sizes.py",
        "nets/names.txt",
        "widths.py",
    }
    assert not folder.exists()


def test_nothing_is_sent_where_nothing_is_the_users_own_or_it_is_installed(start: Path) -> None:
    with packed(Config()) as paths:
        assert paths == []
    config = Config(model="torchvision.models:resnet18")
    import_own(config)
    with packed(config) as paths:
        assert paths == []


def test_a_package_full_of_data_is_not_sent(start: Path) -> None:
    config = make_package(start)
    with (start / "nets" / "images.bin").open("wb") as file:
        file.truncate((MOST_MIB + 1) * 2**20)
    with pytest.raises(BadInput, match=rf"{start}/nets, which is sent .* has more than {MOST_MIB} MiB"), packed(config):
        pass


def test_links_in_a_circle_come_to_an_end(start: Path) -> None:
    config = make_package(start)
    (start / "nets" / "round").symlink_to(start / "nets")
    with packed(config) as paths:
        assert Path(paths[0], "deep", "sizes.py").is_file()


def test_what_was_sent_is_found_before_a_copy_that_lies_at_the_same_path(start: Path) -> None:
    sent = start / "py_modules_files" / "_ray_pkg_1"
    sent.mkdir(parents=True)
    (sent / "own_net.py").write_text("def build(num_classes, input_shape): return 'sent'")
    (start / "own_net.py").write_text("def build(num_classes, input_shape): return 'older'")
    sys.path[:0] = [str(start), str(sent)]  # as Ray does it on its workers
    build = find_callable("--model", "own_net:build", "num_classes", "input_shape")
    assert build(num_classes=1, input_shape=(1, 1, 1)) == "sent"
