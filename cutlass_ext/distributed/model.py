"""What attention over several GPUs should take, from the rates of one GPU and of what joins them. Called by bench.py,
which prints it beside what it measures. A model: it knows nothing of launches, of short calls that fill a GPU badly, or
of transfers that take multiprocessors from the kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates of a GPU and of its links. The defaults are assumptions for an H100, not measurements of this package:
    the TFLOP/s are cuDNN 9.19's there (65,536 tokens, causal, bfloat16), links are less than what they are sold as."""

    forward_tflops: float = 620.0
    backward_tflops: float = 560.0
    memory_gbs: float = 3000.0  # read and written together
    host_gbs: float = 300.0  # of a GPU, each way, to another of its host (NVLink)
    network_gbs: float = 40.0  # to one of another host (400 Gbit/s)
    host_gpus: int = 8
    message_us: float = 20.0  # before the first byte of a step


@dataclass(frozen=True)
class Attention:
    """A call of the whole: `tokens` rows of one sequence, 16 bits an element."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    def flops(self, backward: bool) -> float:
        """Two matrix products over the visible pairs; five in the backward pass."""
        pairs = self.tokens**2 / (2 if self.causal else 1)
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
    ms = _steps_ms(compute, compute + merge, transfer, gpus)
    if backward:
        compute = call.flops(True) / gpus**2 / machine.backward_tflops / 1e9
        add = (10 * out + 26 * kv) / machine.memory_gbs / 1e6  # dq; dk and dv into a share, and into their sum
        gradients = _transfer_ms(4 * kv, machine, gpus)
        ms += _steps_ms(compute, compute + add, transfer + gradients, gpus) + (gradients if gpus > 1 else 0.0)
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
    return ms + (2 if backward else 1) * (exchange + copies)


def _transfer_ms(size: float, machine: Machine, gpus: int) -> float:
    """Of `size` bytes from each GPU; over more than one host the network is what all wait for."""
    gbs = machine.host_gbs if gpus <= machine.host_gpus else machine.network_gbs
    return size / gbs / 1e6 + machine.message_us / 1e3


MODELS = {"ring": ring_ms, "all_to_all": all_to_all_ms}
