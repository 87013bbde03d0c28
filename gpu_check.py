import time, warnings, statistics, sys
import torch, recoup
from torch import nn
from recoup.checkpointing.sampling import sampling
from recoup.checkpointing import digest as D
torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
small = dev == "cpu"
# digests
t = torch.randn(1 << (16 if small else 26), device=dev, dtype=torch.bfloat16)
for name, x in (("flat", t), ("transposed", t.view(1024, -1).t()), ("odd", t[1:])):
    D.digest(x)
    if dev == "cuda": torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()
    s = time.perf_counter(); a = D.digest(x)
    if dev == "cuda": torch.cuda.synchronize(); print("digest", name, f"{(time.perf_counter()-s)*1e3:.2f} ms", (torch.cuda.max_memory_allocated()-before) >> 20, "MiB")
    assert D.is_same(a, D.digest(x.clone()))
    y = x.contiguous().clone(); y.view(-1)[12345] *= -1
    assert not D.is_same(a, D.digest(y))
from transformers import AutoConfig, AutoModelForCausalLM
import transformers
def lm(kind, **kw):
    cfg = AutoConfig.for_model(kind, **kw); m = AutoModelForCausalLM.from_config(cfg).to(dev).train(); m.config.use_cache = False
    ids = torch.randint(0, cfg.vocab_size, (4, 256 if not small else 16), device=dev)
    return m, lambda: m(input_ids=ids, labels=ids).loss
n = dict(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4)
cases = {
 "gpt2": lambda: lm("gpt2", vocab_size=1000, n_embd=256, n_layer=3, n_head=4),
 "llama": lambda: lm("llama", **n),
 "mixtral": lambda: lm("mixtral", num_local_experts=4, **n),
}
def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification
    m = ResNetForImageClassification(ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_labels=10)).to(dev).train()
    x = torch.randn(8, 3, 64, 64, device=dev); l = torch.randint(0, 10, (8,), device=dev)
    return m, lambda: m(pixel_values=x, labels=l).loss
cases["resnet"] = resnet
for name, make in cases.items():
    for amp in (False, True):
        for bench in (False, True) if name == "resnet" else (False,):
            torch.backends.cudnn.benchmark = bench
            torch.manual_seed(1); m, step = make()
            blocks = [b for b in m.modules() if type(b).__name__ in ("GPT2Block", "LlamaDecoderLayer", "MixtralDecoderLayer", "ResNetBasicLayer", "ResNetBottleNeckLayer")]
            for b in blocks:
                f = b.forward; b.forward = (lambda f: lambda *a, **k: recoup.checkpoint(f, *a, **k))(f)
            with warnings.catch_warnings(record=True) as w, sampling("always"):
                warnings.simplefilter("always")
                try:
                    for _ in range(6):
                        with torch.autocast(dev, torch.bfloat16, enabled=amp): loss = step()
                        loss.backward()
                    r = "ok"
                except Exception as e: r = type(e).__name__ + ": " + str(e)[:300]
            print(name, "amp" if amp else "fp32", "bench" if bench else "", len(blocks), r, {str(x.message)[:160] for x in w if "recoup" in str(x.filename) or "round" in str(x.message)}, flush=True)
# cost of a sampled step
torch.manual_seed(0)
m, step = lm("llama", **(n if small else dict(vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=16)))
for b in m.model.layers:
    f = b.forward; b.forward = (lambda f: lambda *a, **k: recoup.checkpoint(f, *a, **k))(f)
for mode in ("never", "always", "never", "always"):
    with sampling(mode):
        ts = []
        for _ in range(3):
            if dev == "cuda": torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats()
            s = time.perf_counter()
            with torch.autocast(dev, torch.bfloat16): loss = step()
            loss.backward()
            if dev == "cuda": torch.cuda.synchronize()
            ts.append(time.perf_counter() - s)
        print("step", mode, [f"{x*1e3:.0f}" for x in ts], (torch.cuda.max_memory_allocated() if dev == "cuda" else 0) >> 20, "MiB", flush=True)
