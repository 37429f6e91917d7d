"""Peak of a step in which torch hooks update each parameter as soon as its gradient is accumulated."""

import warnings
from contextlib import nullcontext

import plain_models
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from tracked import setting


def hooked(module, make):
    """Attach one optimizer per parameter and free the gradient after its step, as torchtune does."""
    optimizers = {p: make([p]) for p in module.parameters()}

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return list(optimizers.values())


def hooked_peak(make, name, sizes, B, S, dtype="fp32", again=None, kernel="eager"):
    """Return the peak bytes from MemTracker on fake tensors."""
    attention = plain_models.flash() if kernel == "flash" else nullcontext()
    with FakeTensorMode(), attention, plain_models.checkpointed(again):
        module, _, ids, targets = setting(name, sizes, B, S, dtype, "foreach")
        tracker = MemTracker()
        tracker.track_external(module, ids, targets, *hooked(module, make))
        with tracker, warnings.catch_warnings():
            # the tracker looks up gradients after each step, though they are None
            warnings.filterwarnings("ignore", "Expected a tensor or a traceable wrapper-subclass", UserWarning)
            plain_models.loss_of(module, ids, targets).backward()  # creates the optimizer states
            tracker.reset_mod_stats()
            plain_models.loss_of(module, ids, targets).backward()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    return found["Total"]
