"""The guard of recovery: a layer runs in place only while xhat can be recovered from z (`inplace_abn.guard.recovery`).

The rule is deterministic, so that the same seed gives the same bits. Generations count the steps of all optimizers of
the process. A layer measures in the first generation that it sees, then in growing distances, and then once in every
``guard_interval`` generations, for each dtype by itself, and for training and evaluation. In such a generation it
measures the first calls, each on a sample of the call's input, before the input is overwritten. What a layer does is
constant within a generation, so that micro-batches agree. It changes in the next generation. The copy of the figures to
the host starts when they are measured, so the host waits for the first measurement of a layer only: its first step must
be right, too.

A checkpoint's recomputation belongs to the generation of its forward pass, whatever optimizer stepped in between. It is
measured if the forward pass was not, because under reentrant checkpoints only the recomputation needs gradients.

Channels are given up, not layers: xhat of a channel above the threshold is saved beside z, until the channel is below
a quarter of it. A layer in which most channels are ill is not trusted. It runs `autograd.plain.kept`: it keeps x, as
torch does. A signed weight is then the scale itself, even within eps of zero.

A measurement holds for weights and biases within bounds (`figures.bounds`). Calls on the CPU look at them, and a layer
that has left them is measured in that call, as a new one is. So is, on every device, one whose weights somebody else
than an optimizer has written to. What writes more than a few times in an interval counts as an optimizer.

Calls that are compiled, captured, traced or transformed by torch.func keep the mode that the layer had, because a
measurement would make the host wait.

Anything may follow a converted norm, so its measurement depends on what follows. What follows for the first time is
measured in that call.
"""

from inplace_abn.guard import generations as generations
from inplace_abn.guard.decisions import Plan as Plan
from inplace_abn.guard.decisions import current_mode as current_mode
from inplace_abn.guard.decisions import decide as decide
from inplace_abn.guard.decisions import decided as decided
from inplace_abn.guard.decisions import has_left as has_left
from inplace_abn.guard.decisions import plan as plan
from inplace_abn.guard.decisions import stays_untrusted as stays_untrusted
from inplace_abn.guard.generations import is_paused as is_paused
from inplace_abn.guard.generations import now as now
from inplace_abn.guard.generations import paused as paused
from inplace_abn.guard.layers import CARRIED as CARRIED
from inplace_abn.guard.layers import Guarded as Guarded
from inplace_abn.guard.layers import check_interval as check_interval
from inplace_abn.guard.layers import forget as forget
from inplace_abn.guard.layers import give_up as give_up
from inplace_abn.guard.layers import given_up as given_up
from inplace_abn.guard.layers import is_noticed as is_noticed
from inplace_abn.guard.layers import layers_called as layers_called
from inplace_abn.guard.layers import layers_of as layers_of
from inplace_abn.guard.layers import mode_of as mode_of
from inplace_abn.guard.layers import modes_of as modes_of
from inplace_abn.guard.layers import name as name
from inplace_abn.guard.layers import notice_writes as notice_writes
from inplace_abn.guard.layers import renew as renew
from inplace_abn.guard.layers import renew_if_written as renew_if_written
from inplace_abn.guard.layers import set_guard as set_guard
from inplace_abn.guard.layers import slots as slots
from inplace_abn.guard.layers import strip as strip
from inplace_abn.guard.modes import CALLS as CALLS
from inplace_abn.guard.modes import Decision as Decision
from inplace_abn.guard.modes import Mode as Mode
