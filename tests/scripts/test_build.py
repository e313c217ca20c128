"""The build: what it makes, what it needs, and the messages if something does not fit."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import check_symbols
import fresh
import pytest
import torch
from torch.utils import cpp_extension

import inplace_abn
from inplace_abn.autograd import nodes

PACKAGE = Path(inplace_abn.__file__).parent
KERNELS = PACKAGE / "_kernels.so"
RELEASE = "_".join(torch.__version__.split("+")[0].split(".")[:2])
LIBRARY = f"_node_{RELEASE}.so"
"""The wheel's node for this torch."""


def run_in(folder, *command, **environment):
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )


# An editable installation puts finders before the path. They are removed.
IMPORT = """
import os, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path.insert(0, ".")
os.chdir({folder!r})
"""


def import_in(folder, code="import inplace_abn"):
    return fresh.run_code(IMPORT.format(folder=str(folder)) + code)


@pytest.fixture
def copy_of_sources(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "inplace_abn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_a_source_tree_that_was_never_built_names_the_command(copy_of_sources):
    result = import_in(copy_of_sources)
    assert result.returncode != 0
    assert "never built" in result.stderr
    assert "pip install --no-build-isolation -e ." in result.stderr


def test_kernels_that_cannot_be_loaded_name_the_cause_and_the_command(copy_of_sources):
    (copy_of_sources / "inplace_abn" / KERNELS.name).write_bytes(b"\x7fELF of another platform")
    result = import_in(copy_of_sources)
    assert "cannot be loaded under torch" in result.stderr
    assert "again from their source tree: `pip install" in result.stderr


TRAIN = """
import logging
logging.basicConfig(level=logging.INFO)
import inplace_abn
import torch
from torch.utils import cpp_extension
x = torch.ones(4, 3, 5, requires_grad=True)
for _ in range(2):  # the first graph is Python's, which tells what a sole holder looks like
    z = inplace_abn.InPlaceABN(3)(x * torch.rand(4, 3, 5))
    z.square().sum().backward()
print(type(z.grad_fn).__name__, x.grad.isfinite().all().item())
"""


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, f"there is none for torch {torch.__version__}, but for no other"),
        ({"_node_1_4.so": "", "_node_1_5.so": ""}, "but for 1.4, 1.5"),
        ({LIBRARY: "no library"}, "cannot be loaded"),
        ({"_node.py": 'torch_version = "1.4.2"\n'}, "was built for torch 1.4.2"),
        ({"_node.py": 'raise ImportError("undefined symbol")\n'}, "undefined symbol"),
    ],
    ids=["none", "of other releases", "broken", "module of another torch", "broken module"],
)
def test_without_the_node_there_is_one_line_of_information_and_no_feature_less(files, reason, copy_of_sources):
    shutil.copy(KERNELS, copy_of_sources / "inplace_abn")
    for name, content in files.items():
        (copy_of_sources / "inplace_abn" / name).write_text(content)
    result = import_in(copy_of_sources, TRAIN)
    assert result.stdout.split() == ["InPlaceABNFunctionBackward", "True"]
    told = [line for line in result.stderr.splitlines() if "inplace_abn" in line]
    assert len(told) == 1
    assert reason in told[0]


@pytest.mark.skipif(nodes.cpp is None, reason="built without the node")
def test_the_environment_turns_the_node_off():
    for value, name in (("0", "InPlaceABNFunctionBackward"), ("1", "CppFunction")):
        result = fresh.run_code(TRAIN, INPLACE_ABN_NODE=value)
        assert result.stdout.split() == [name, "True"]
        assert "inplace_abn" not in result.stderr


def test_kernels_need_nothing_of_torch_but_its_stable_abi(capsys):
    if shutil.which("nm") is None or sys.platform != "linux":
        pytest.skip("needs nm and readelf")
    assert check_symbols.main(str(KERNELS)) == 0
    printed = capsys.readouterr().out
    assert "aoti_torch_get_data_ptr" in printed or "torch_get_const_data_ptr" in printed
    assert "torch_parallel_for" in printed


def test_symbols_outside_of_the_stable_abi_are_found(capsys):
    if shutil.which("nm") is None or sys.platform != "linux":
        pytest.skip("needs nm and readelf")
    assert check_symbols.main(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so")) == 1
    printed = capsys.readouterr().out
    assert "Py" in printed
    assert "at::Tensor" in printed or "c10::" in printed
    assert "libc10.so" in printed


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """The interpreter of a virtual environment in which nothing was installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize(
    ("installed", "lacking"),
    [
        ({}, r"torch is missing, setuptools is (missing|\d\S+), ninja is missing"),
        ({"torch": "2.13.0+cpu", "setuptools": "65.5.0"}, r"setuptools is 65\.5\.0, ninja is missing"),
        ({"torch": "2.9.1+cpu", "setuptools": "80.9.0"}, r"torch is 2\.9\.1\+cpu, ninja is missing"),
        ({"torch": "2.11.0", "setuptools": "77.0.3"}, "ninja is missing"),
    ],
    ids=["bare", "torch alone", "old torch", "no ninja"],
)
def test_an_installation_from_source_says_in_one_sentence_what_to_install_before(
    installed, lacking, bare_python, source_tree, tmp_path
):
    """setup.py imported what an old setuptools lacks before its own message, and is not reached without setuptools."""
    for name, version in installed.items():
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)}
    for command in (["-m", "pip", "install", "--no-index", "--no-build-isolation", "."], ["setup.py", "build_ext"]):
        result = run_in(source_tree, bare_python, *command, **environment)
        assert result.returncode == 1
        printed = result.stdout + result.stderr
        assert "Traceback" not in printed
        (told,) = re.findall(r"inplace_abn: .*", printed)
        assert re.fullmatch(
            rf"inplace_abn: a build without isolation needs torch >= 2\.11, setuptools >= 77 and ninja, but in "
            rf'.*/bare\w* {lacking}\. Install them first: pip install "torch>=2\.11" "setuptools>=77" ninja\. Or .*',
            told,
        )


@pytest.fixture
def small_tree(source_tree, tmp_path):
    """The source tree with empty C++ sources, which compile in a moment. A test may put in sources that do not
    compile."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs a C++ compiler")
    for name in ("build_backend.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source_tree / name, tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "inplace_abn", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in (
        "kernels/dispatch.cpp",
        "kernels/dispatch_backward.cpp",
        "kernels/dispatch_rows.cpp",
        "node/node.cpp",
        "node/bindings.cpp",
        "node/ops.cpp",
        "node/norm.cpp",
        "node/rows.cpp",
        "node/library.cpp",
    ):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).touch()
    return tmp_path


def build_wheel(tree, **environment):
    command = [sys.executable, "setup.py", "bdist_wheel"]
    # The variables of the surroundings must not reach this build.
    plain = {
        "INPLACE_ABN_FORCE_CPU": "1",
        "INPLACE_ABN_FORCE_CUDA": "0",
        "INPLACE_ABN_PORTABLE": "0",
        "INPLACE_ABN_NODE": "1",
        "INPLACE_ABN_NODE_HEADERS": "",
    }
    result = run_in(tree, *command, **plain | environment)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tree.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return result.stdout, wheel.name, archive.namelist()


def test_a_node_that_does_not_compile_costs_one_line(small_tree):
    (small_tree / "src/node/node.cpp").write_text("#error torch has changed\nint f( {\n")
    printed, name, contents = build_wheel(small_tree)
    (line,) = [line for line in printed.splitlines() if "error" in line]
    assert re.match("inplace_abn: the optional C\\+\\+ node was not built for torch .*#error torch has changed", line)
    assert "-py3-none-" not in name
    assert [name for name in contents if name.endswith(".so")] == ["inplace_abn/_kernels.so"]


def test_a_wheel_without_the_node_is_for_every_python_and_holds_the_package_alone(small_tree):
    printed, name, contents = build_wheel(small_tree, INPLACE_ABN_NODE="0")
    assert "no C++ node" in printed
    assert name.startswith(f"inplace_abn-{inplace_abn.__version__}-py3-none-linux_")
    assert [name for name in contents if name.endswith(".so")] == ["inplace_abn/_kernels.so"]
    assert {name.split("/")[0] for name in contents} == {
        "inplace_abn",
        f"inplace_abn-{inplace_abn.__version__}.dist-info",
    }


def test_a_wheel_with_nodes_for_releases_of_torch_is_for_every_python(small_tree):
    include = cpp_extension.include_paths()[0]
    printed, name, contents = build_wheel(small_tree, INPLACE_ABN_NODE_HEADERS=include)
    assert "C++ nodes for 1 releases of torch" in printed
    assert name.startswith(f"inplace_abn-{inplace_abn.__version__}-py3-none-linux_")
    compiled = sorted(name for name in contents if name.endswith(".so"))
    assert compiled == ["inplace_abn/_kernels.so", f"inplace_abn/{LIBRARY}"]


NODE_OF_WHEEL = """
import copy
import torch
from torch.utils import cpp_extension
from inplace_abn.autograd import nodes
leaf = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
def gradients(node):
    nodes.cpp, found = node, []
    for activation in ("leaky_relu", "silu"):
        module = inplace_abn.InPlaceABN(3, activation=activation).double()
        z = module(leaf * 2.0)
        (gradient,) = torch.autograd.grad(z.square().sum(), leaf, create_graph=True)
        found += [z, gradient, *torch.autograd.grad(gradient.square().sum(), [leaf, module.weight])]
        print(type(z.grad_fn).__name__)
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.LeakyReLU(inplace=True)).double()
    found.append(torch.autograd.grad(inplace_abn.convert(net)(leaf * 2.0).square().sum(), leaf)[0])
    return found
import inplace_abn
own = nodes.cpp
gradients(own)
for a, b in zip(gradients(own), gradients(None), strict=True):
    torch.testing.assert_close(a, b)

nodes.cpp, seen = own, []
class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(func.namespace)
        return func(*args, **(kwargs or {}))

net = inplace_abn.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.ReLU()).double())
for step in range(9):
    net(leaf * 2.0).square().sum().backward()
    inplace_abn.guard.generations.advance()
assert net[0]._record.cpp_call is not None

class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.rms, self.group = torch.nn.LayerNorm(5), torch.nn.RMSNorm(5), torch.nn.GroupNorm(3, 3)
        self.each = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))

    def forward(self, x):
        first, second, third, last = self.each
        return last(torch.nn.functional.gelu(third(self.group(second(self.rms(first(self.layer(x))))))))

for autocast in (False, True):
    torch.manual_seed(0)
    native = Rows()
    with torch.no_grad():
        native.layer.weight[1] = 0
    nets = native, inplace_abn.convert(copy.deepcopy(native))
    x = torch.randn(4, 3, 5, requires_grad=True)
    for step in range(15):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            a, b = (torch.autograd.grad(net(x).float().square().sum(), [x, *net.parameters()]) for net in nets)
        inplace_abn.guard.generations.advance()
        for mine, torchs in zip(b, a, strict=True):
            assert (mine - torchs).norm() <= (0.1 if autocast else 1e-4) * torch.stack([t.norm() for t in a]).norm()
    assert nets[1].layer._record.cpp_call is not None
    assert all(layer.in_place for layer in inplace_abn.report(nets[1]).layers if layer.is_norm)

with Seeing():
    net(leaf * 2.0).square().sum().backward()
assert seen and set(seen) <= {"aten", "inplace_abn"}, set(seen)
torch.testing.assert_close(torch.jit.trace(net, leaf, check_trace=False)(leaf), net(leaf))
"""


@pytest.fixture(scope="module")
def node_of_wheel(tmp_path_factory):
    """The wheel's node for this torch, as scripts/build_wheel.sh builds it, but for the portable runtime."""
    root = PACKAGE.parent
    if not (root / "setup.py").exists() or shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs the source tree and a C++ compiler")
    folder = tmp_path_factory.mktemp("node")
    include = Path(cpp_extension.include_paths()[0])
    source = root / "src/node/library.cpp"
    includes = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-lc10"]
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(folder / LIBRARY)]
    subprocess.run([os.environ.get("CXX", "c++"), *options, *includes, str(source), *libraries], check=True)
    return folder / LIBRARY


@pytest.mark.slow
def test_the_wheels_node_does_what_the_node_in_python_does(node_of_wheel, copy_of_sources):
    for file in (KERNELS, node_of_wheel):
        shutil.copy(file, copy_of_sources / "inplace_abn")
    result = import_in(copy_of_sources, NODE_OF_WHEEL)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-4:] == ["CppFunction"] * 2 + ["InPlaceABNFunctionBackward"] * 2


def test_nothing_tells_to_install_the_other_project_of_this_name(source_tree):
    texts = [source_tree / "setup.py", *PACKAGE.glob("*.py")]
    for path in texts:
        assert not re.search(r"pip install (-U |--upgrade )?inplace[-_]abn", path.read_text()), path


def test_source_distribution_holds_all_that_a_build_needs(source_tree, tmp_path):
    root = source_tree
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    needed = {"build_backend.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    needed.add("inplace_abn/py.typed")
    for folder, pattern in [
        ("scripts", "*"),
        ("tests", "*.py"),
        ("include", "*.h"),
        ("src", "*.cpp"),
        ("src", "*.h"),
        ("src", "*.cu*"),
        ("src", "*.map"),
        ("inplace_abn", "*.py"),
    ]:
        found = [path for path in (root / folder).rglob(pattern) if path.is_file()]
        needed |= {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts}
    assert needed <= names


@pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's list of mapped files")
def test_the_only_pool_of_threads_is_torchs():
    maps = fresh.run_code("import inplace_abn; print(open('/proc/self/maps').read())").stdout
    libraries = {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}
    assert KERNELS.name in libraries
    assert len([name for name in libraries if name.startswith(("libgomp", "libomp", "libiomp"))]) == 1
