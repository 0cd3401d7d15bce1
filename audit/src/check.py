import math, re, torch, torch.distributed as dist

def check(named, groups, norm=None, rtol=1e-4):
    """named: (name, parameter, gradient behind all sums), of tied copies one; groups: a process group by axis; norm: the program's."""
    assert norm is None or not SHARDED, "gradients are sharded: give no norm, or run without a sharded optimizer"
    named, total, wrong = list(named), 0.0, []
    for name, p, g in named:
        row = next((r for r in ROWS if re.search(r[0], name)), None)
        if row is None:
            wrong.append(f"{name}: not in the audit")
            continue
        for what, x, same in (("parameter", p, row[2]), ("gradient", g, row[3])):
            x = x.to_local() if hasattr(x, "to_local") else x  # of a DTensor
            for axis in same.split() if x is not None else []:
                least, most = x.detach().clone(), x.detach().clone()
                dist.all_reduce(least, dist.ReduceOp.MIN, group=groups[axis])
                dist.all_reduce(most, dist.ReduceOp.MAX, group=groups[axis])
                if not torch.equal(least, most):
                    wrong.append(f"{name}: the {what} is not the same over {axis}")
        copies = math.prod(dist.get_world_size(groups[axis]) for axis in row[2].split())
        total += 0.0 if x is None else x.detach().double().square().sum().item() / copies
    device = next((p.device for _, p, _ in named), "cpu")
    total = torch.tensor(total, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    own = math.sqrt(total.item())
    if norm is not None and abs(own - float(norm)) > rtol * own:
        wrong.append(f"the norm is {float(norm):.9g}, and {own:.9g} if each element counts once")
    assert not wrong, "\n".join(wrong)
