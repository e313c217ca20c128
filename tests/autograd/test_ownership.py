"""However a net is wired and differentiated, its values and gradients are those of the out-of-place oracle, and what
others hold keeps its content."""

import pytest
import torch
from evaluation import CONTEXTS, LOSSES, evaluate
from wired_nets import WATCH, Row
from wirings import WIRINGS

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = ["chain", "residual block", "abn(a) + abn(b)", "dense block", "conv(abn(x)) + x", "z + z"]

ROWS = [
    *(Row(w) for w in WIRINGS),
    *(Row(w, loss="sum", layout="channels_last") for w in WIRINGS),
    *(Row(w, loss=loss) for w in WIRINGS for loss in ("retained once", "gradient by the caller")),
    *(Row(w, loss=loss) for w in FEW for loss in LOSSES),
    *(Row(w, watch=watch) for w in WIRINGS for watch in ("z kept", "gradient kept", "retain_grad")),
    *(Row(w, loss, watch) for w in FEW for loss in ("sum", "weighted", "retained once") for watch in WATCH),
    *(Row(w, context=c) for w in WIRINGS for c in ("checkpoint", "reentrant checkpoint", "hooks that keep")),
    *(Row(w, loss, context=c) for w in FEW for loss in ("weighted", "sum", "retained twice") for c in CONTEXTS),
    *(Row(w, loss, frozen=f) for w in FEW for loss in ("weighted", "sum") for f in ("weights", "biases")),
    *(Row(w, loss, frozen="weights and biases") for w in FEW for loss in ("weighted", "sum")),
    *(Row(w, loss, frozen=f) for w in FEW for loss in ("weighted", "sum") for f in ("input", "input and first conv")),
    *(Row("chain", loss, frozen="all but one bias") for loss in LOSSES),
    *(Row(w, training=False) for w in WIRINGS),
    *(Row(w, loss, training=False, layout="channels_last") for w in FEW for loss in LOSSES),
    *(Row(w, loss, activation=a) for w in FEW for loss in ("weighted", "sum") for a in ("identity", "elu", "relu")),
]
ROWS = list(dict.fromkeys(ROWS))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_wiring_equals_the_out_of_place_oracle(row, device):
    expected = evaluate(row, False, device)
    actual = evaluate(row, True, device)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
