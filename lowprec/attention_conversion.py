"""apply and restore for the attentions of a plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowprec.attention_coverage import Site, attention_sites
from lowprec.attention_planning import AttentionPlan
from lowprec.errors import PlanError
from lowprec.nn.attention import Attention, AttentionProducts
from lowprec.nn.sdpa import RedirectsAttention, redirecting


def checked_attentions(
    model: nn.Module, plans: tuple[AttentionPlan, ...]
) -> list[tuple[nn.Module, AttentionPlan]]:
    """The modules that `plans` convert; raises PlanError, before anything changes, if one is not
    what its plan was made for."""
    sites = {site.names[0]: site for site in attention_sites(model)}
    if not plans:
        for name, site in sites.items():
            if site.module.__dict__.get("lowprec_applied"):
                raise PlanError(
                    f"the plan has no attentions, but an earlier plan converted {name!r}; call "
                    "lowprec.restore(model) first"
                )
        return []
    planned = {one.name for one in plans}
    for name in sites:
        if name not in planned:
            raise PlanError(f"the model has an attention {name!r} that the plan does not know")
    found = []
    for one in plans:
        if one.name not in sites:
            raise PlanError(
                f"the plan names attention {one.name!r}, which this model does not have"
            )
        site = sites[one.name]
        if one.converted:
            _check(one, site)
            found.append((site.module, one))
        elif site.module.__dict__.get("lowprec_applied"):
            raise PlanError(
                f"the plan leaves attention {one.name!r} as it is, which an earlier plan "
                "converted; call lowprec.restore(model) first"
            )
    return found


def _check(plan: AttentionPlan, site: Site) -> None:
    if site.reason is not None:
        raise PlanError(f"attention {plan.name!r} can no longer be converted: {site.reason}")
    if (site.activation, site.mask) != (plan.activation, plan.mask):
        raise PlanError(
            f"attention {plan.name!r} computes {site.activation} with mask {site.mask}, the plan "
            f"was made for {plan.activation} with mask {plan.mask}"
        )


def convert_attention(module: nn.Module, plan: AttentionPlan) -> None:
    """Run one attention by its plan, in place."""
    if "lowprec_attention" not in module.__dict__:
        module.__dict__["lowprec_attention"] = AttentionProducts(plan.stages, layer=plan.name)
        module.__dict__["lowprec_mask"] = plan.mask
        ours: Any = redirecting(type(module))
        module.__class__ = ours
    products: AttentionProducts = module.__dict__["lowprec_attention"]
    if isinstance(module, Attention) and "lowprec_applied" not in module.__dict__:
        module.__dict__["lowprec_built"] = products.stages
    products.layer = plan.name
    products.replan(plan.stages)
    module.__dict__["lowprec_applied"] = True


def restore_attentions(model: nn.Module) -> None:
    """Undo `convert_attention` wherever it was done."""
    for module in model.modules():
        if not module.__dict__.get("lowprec_applied"):
            continue
        if isinstance(module, Attention):
            module.lowprec_attention.replan(module.__dict__.pop("lowprec_built"))
            del module.__dict__["lowprec_applied"]
        elif isinstance(module, RedirectsAttention):
            original: Any = type(module).__mro__[2]
            for name in ("lowprec_attention", "lowprec_mask", "lowprec_applied"):
                del module.__dict__[name]
            module.__class__ = original
