"""The emulator itself: it names each fault of a kernel, and reports none where there is none."""

import re
import shutil
import subprocess
import sys

import pytest
from cases import needs_kernels

from emulation import build, emulated
from emulation.mutations import MUTATIONS
from emulation.translate import translate

pytestmark = [pytest.mark.emulated, *needs_kernels]

FAULTS = {
    "reads_before_x": "thread 0: reads 4 bytes, 4 bytes before the first element of x",
    "reads_behind_y": "thread 63: reads 4 bytes, 0 bytes behind the last element of y",
    "writes_behind_x": "thread 12[567]: writes 4 bytes, [048] bytes behind the last element of x",
    "writes_what_is_read_only": "writes y, which it must not",
    "reads_the_gap_of_a_slice": "reads 4 bytes between the elements of y",
    "reads_a_null_pointer": "reads 4 bytes, .* bytes before the first element of",
    "reads_a_misaligned_vector": "a misaligned access: 16 bytes, 4 past",
    "writes_a_misaligned_vector": "a misaligned access: 16 bytes, 8 past",
    "writes_a_vector_over_the_end": "thread 0: writes 8 bytes, 0 bytes behind the last element of x",
    "reads_a_misaligned_number": "a misaligned access: 8 bytes, 4 past",
    "uses_an_unknown_instruction": "an unknown instruction: st.global.v2.u32",
    "misses_a_barrier": "a race: it (reads|writes) element [0-9]+ of shared memory, as thread [0-9]+ does",
    "races_between_blocks": "a race: it writes element [0-9]+ of x, as another block does",
    "reads_what_another_block_writes": "a race: it (reads|writes) element [0-9]+ of x, as another block does",
    "writes_behind_shared_memory": "thread 63: writes 4 bytes behind shared memory",
    "has_too_much_shared_memory": "49160 bytes of static shared memory are beyond 48 KB",
    "leaves_before_a_barrier": r"a barrier that not all threads reach: .* thread 7 has left the kernel",
    "has_two_barriers_for_one": "a barrier that not all threads reach: thread 0 waits .* thread 32 waits",
    "shuffles_without_a_lane": "a shuffle with an absent partner: .* thread 9 has left the kernel",
    "shuffles_from_outside_of_the_mask": "thread (15|47): a shuffle from lane 16, which its mask 0xffff leaves out",
    "shuffles_in_half_a_warp": "a shuffle with an absent partner: the block has no thread 48",
}
LAUNCHES = {
    "is_launched_beyond_its_bound": "a block of 64 x 1 x 1 threads is beyond the launch bound of 32",
    "has_an_endless_block": "a block of 1025 x 1 x 1 threads is empty or beyond 1024",
}


@pytest.fixture
def emulator():
    loaded = emulated.load()
    loaded.set()
    yield loaded
    loaded.set()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_kernel_block_and_thread(name, seed, emulator):
    emulator.set(seed=seed)
    message = emulator.fault(name)
    assert re.match(rf"emulated device: {name}, block [0-9]+, thread [0-9]+: ", message), message
    assert re.search(FAULTS[name], message), message


def test_a_result_made_of_shared_memory_that_was_never_set_differs_from_run_to_run(emulator):
    message = emulator.fault("reads_shared_memory_that_was_never_set")
    assert "results depend on the order of blocks and threads: element 5 of x" in message


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_beyond_the_limits_is_named_with_its_kernel(name, emulator):
    message = emulator.fault(name)
    assert message.startswith(f"emulated device: the launch of {name}: {LAUNCHES[name]}"), message


@pytest.mark.parametrize(("capability", "held"), [(75, 1024), (86, 1536), (90, 2048), (61, None)])
def test_a_launch_bound_beyond_what_the_device_holds_is_told(capability, held, emulator):
    emulator.set(capability=capability)
    message = emulator.fault("has_bounds_for_large_multiprocessors")
    if held is None:
        assert "an unknown capability, 61" in message
    elif held < 20 * 64:
        assert f"20 blocks of 64 threads are more than a multiprocessor holds, {held}" in message
    else:
        assert message == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.skipif(not build.CONTRACTED, reason="this processor cannot fuse a product and a sum")
def test_kernels_that_fuse_products_and_sums_do_so():
    def fused(flags):
        (item,) = build.kernel_objects(("float",), flags=(*build.CALLS, *flags), sources="src/kernels/cuda/rows*.cu")
        (path,) = build.compiled([item])
        return re.findall("fmadd", subprocess.run(["objdump", "-d", path], capture_output=True, text=True).stdout)

    assert fused(build.CONTRACTED)
    assert not fused(())


def test_a_kernel_without_fault_runs(emulator):
    assert emulator.fault("none") == ""


def test_more_blocks_than_a_grid_has_are_several_launches(emulator):
    # All blocks of the first launch would take hours.
    emulator.set(sample=5)
    assert emulator.fault("numbers_more_blocks_than_a_grid_has") == ""


def test_devices_are_an_h100_and_others(emulator):
    assert emulator.devices()[0] == "H100"
    assert len(emulator.devices()) == 4


def test_the_sources_are_translated_without_moving_a_line():
    for path in build.CUDA.glob("*.*"):
        text = path.read_text()
        translated = translate(text)
        assert translated.count("\n") == text.count("\n"), path.name
        assert not re.search(r"<<<|__shared__|\basm\b", translated), path.name


def test_what_the_translation_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="PTX with outputs"):
        translate('asm volatile("mov.u32 %0, %1;" : "=r"(a) : "r"(b));')


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_changes_the_kernels(name):
    file, old, _ = MUTATIONS[name]
    assert old in (build.CUDA / file).read_text()


@pytest.mark.slow
def test_fibers_by_the_systems_context_switch_do_the_same():
    """Processors other than x86-64 use these fibers."""
    library = build.link("ucontext", [*build.device_objects(("-DEMULATION_UCONTEXT",)), build.faulty_object()])
    names = " ".join(FAULTS)
    script = (
        "import ctypes, sys, torch\n"
        f"library = ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL | 1)\n"
        "library.emulation_fault.restype = ctypes.c_char_p\n"
        f"print(*(library.emulation_fault(name.encode()).decode() for name in {names!r}.split()), sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for expected, found in zip(FAULTS.values(), done.stdout.splitlines(), strict=True):
        assert re.search(expected, found)
