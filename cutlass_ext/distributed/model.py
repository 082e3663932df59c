"""What attention over several GPUs should take, from the rates of one GPU and of what joins them. Called by bench.py,
which prints it beside what it measures, and by interface.py for method="auto". A model: it knows of launches, of the
ends of kernels, and of transfers that take multiprocessors from them, only as one constant a pass."""

from dataclasses import dataclass

KEPT_BYTES = 1 << 27  # of K and V of all ranks, up to which all_gather.py keeps them for the backward pass


@dataclass(frozen=True)
class Machine:
    """Rates of a GPU and of its links: of two H200s, as bench/results/distributed_h200.md has them. Fitted there: the
    TFLOP/s are one GPU's at 65,536 tokens, `host_gbs` is NCCL's of one message of 64 MB; `memory_gbs` and `pass_us` are
    those of ring and all_to_all at commit a9c3e12, `gather_us` is all_gather's forward at 0058028. Nothing across hosts
    has been measured."""

    forward_tflops: float = 744.0
    backward_tflops: float = 581.0
    memory_gbs: float = 3000.0  # read and written together
    pass_us: float = 300.0  # forward or backward, on more than one GPU, beyond what is counted
    gather_us: float = 60.0  # the same of all_gather
    host_gbs: float = 266.0  # of a GPU, each way, to another of its host (NVLink)
    network_gbs: float = 40.0  # to one of another host (400 Gbit/s)
    host_gpus: int = 8
    message_us: float = 20.0  # before the first byte of a step


@dataclass(frozen=True)
class Attention:
    """A call of the whole: sequences of `lengths` rows, 16 bits an element."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def flops(self, backward: bool) -> float:
        """Two matrix products over the visible pairs; five in the backward pass."""
        pairs = sum(n**2 for n in self.lengths) / (2 if self.causal else 1)
        return (10 if backward else 4) * self.heads * self.head_dim * pairs


def one_gpu_ms(call: Attention, machine: Machine, backward: bool) -> float:
    """The forward pass, or forward and backward."""
    ms = call.flops(False) / machine.forward_tflops / 1e9
    return ms + (call.flops(True) / machine.backward_tflops / 1e9 if backward else 0.0)


def ring_ms(call: Attention, machine: Machine, gpus: int, backward: bool) -> float:
    """Steps of equal work (zigzag), each as long as its computing or its transfer, whichever is longer.

    The first transfer is beside the rank's own keys. Backward the gradients of K and V, in float32, go back in the step
    after; the last ones are beside nothing.
    """
    rows = call.tokens / gpus
    out, kv = rows * call.heads * call.head_dim, 2 * rows * call.kv_heads * call.head_dim
    merge = 18 * out / machine.memory_gbs / 1e6
    compute = call.flops(False) / gpus**2 / machine.forward_tflops / 1e9
    transfer = _transfer_ms(2 * kv, machine, gpus)
    extra = machine.pass_us / 1e3 if gpus > 1 else 0.0
    ms = _steps_ms(compute, compute + merge, transfer, gpus) + extra
    if backward:
        compute = call.flops(True) / gpus**2 / machine.backward_tflops / 1e9
        add = (14 * out + 26 * kv) / machine.memory_gbs / 1e6  # dq, delta; dk and dv into a share, and their sum
        gradients = _transfer_ms(4 * kv, machine, gpus)
        ms += _steps_ms(compute, compute + add, transfer + gradients, gpus) + (gradients if gpus > 1 else 0.0) + extra
    return ms


def _steps_ms(own: float, step: float, transfer: float, gpus: int) -> float:
    if gpus == 1:
        return own
    return max(own, transfer) + (gpus - 2) * max(step, transfer) + step


def all_to_all_ms(call: Attention, machine: Machine, gpus: int, backward: bool) -> float | None:
    """Exchanges that nothing is beside, and a part of the heads; None where the heads cannot be cut."""
    if call.heads % gpus or (call.kv_heads % gpus and gpus % call.kv_heads):
        return None
    rows = call.tokens / gpus
    sent = rows * (call.heads + 2 * max(call.kv_heads, gpus)) * call.head_dim  # q, k, v
    back = rows * call.heads * call.head_dim
    exchange = _transfer_ms(2 * (sent + back) * (gpus - 1) / gpus, machine, gpus) if gpus > 1 else 0.0
    copies = (12 * sent + 8 * back) / machine.memory_gbs / 1e6
    ms = one_gpu_ms(call, machine, backward) / gpus
    return ms + (2 if backward else 1) * (exchange + copies + (machine.pass_us / 1e3 if gpus > 1 else 0.0))


def all_gather_ms(call: Attention, machine: Machine, gpus: int, backward: bool) -> float:
    """K and V of the first heads, which nothing is beside; the others' beside those. Backward long ones come again; the
    gradients of all heads but those go back beside those, and theirs beside nothing."""
    ms = one_gpu_ms(call, machine, backward) / gpus
    if gpus == 1:
        return ms
    rows = call.tokens / gpus
    out, kv = rows * call.heads * call.head_dim, 2 * rows * call.kv_heads * call.head_dim
    first = max(call.kv_heads // 8, 1) / call.kv_heads

    def transfer(part: float) -> float:
        return _transfer_ms(part * 2 * kv * (gpus - 1), machine, gpus)

    def exposed(compute: float) -> float:
        late = max(transfer(1 - first) - first * compute / gpus, 0.0) if first < 1 else 0.0
        return transfer(first) + late + machine.gather_us / 1e3

    ms += exposed(call.flops(False) / machine.forward_tflops / 1e9) + 4 * first * kv / machine.memory_gbs / 1e6
    if backward:
        again = transfer(1) if 2 * kv * gpus > KEPT_BYTES else 0.0
        sums = (4 * out + 6 * (gpus + 0.5) * kv) / machine.memory_gbs / 1e6
        ms += again + exposed(call.flops(True) / machine.backward_tflops / 1e9) + sums
    return ms


def _transfer_ms(size: float, machine: Machine, gpus: int) -> float:
    """Of `size` bytes from each GPU; over more than one host the network is what all wait for."""
    gbs = machine.host_gbs if gpus <= machine.host_gpus else machine.network_gbs
    return size / gbs / 1e6 + machine.message_us / 1e3


MODELS = {"ring": ring_ms, "all_to_all": all_to_all_ms, "all_gather": all_gather_ms}
