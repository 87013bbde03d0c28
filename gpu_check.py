import threading, time, torch, warnings
from concurrent.futures import ThreadPoolExecutor
from torch import nn
from recoup import checkpoint, Checkpoint
from recoup.errors import RecoupWarning
warnings.simplefilter("error", RecoupWarning)
dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
C = Checkpoint(check="values")
inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh()).to(dev)
def nested(x): return checkpoint(inner, checkpoint(inner, x))
def penalty(x):
    y = checkpoint(nested, x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + g
s = time.time()
x = torch.randn(8, 16, device=dev, requires_grad=True)
checkpoint(penalty, x * 1).sum().backward()
print("backward inside", time.time() - s)
s = time.time()
xs = torch.randn(4, 10, 8, 16, device=dev, requires_grad=True)
def work(i):
    for x in xs[i]: C(nested, x * 1).sum().backward()
    return i
with ThreadPoolExecutor(4) as pool: print(list(pool.map(work, range(4))), time.time() - s)
print(inner[1].num_batches_tracked.item(), "expected", 2 + 2 * 40)
