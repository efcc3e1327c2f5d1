"""Attention on CUDA as a node of PyTorch's graph."""

import torch

from . import launch, launch_backward, launch_packed


class Attention(torch.autograd.Function):
    """One forward launch; keeps its inputs, out and the LSE, from which the gradients recompute the rest."""

    @staticmethod
    def forward(ctx, q, k, v, sink, alibi_slopes, recipe):
        out, lse = launch.execute(recipe, q, k, v, sink=sink, alibi_slopes=alibi_slopes)
        ctx.save_for_backward(q, k, v, out, lse, sink, alibi_slopes)
        ctx.recipe = recipe.gradients
        ctx.set_materialize_grads(False)  # a result that no loss used arrives as None and costs nothing
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 6
        wanted = ctx.needs_input_grad[:4]
        gradients = AttentionGradients.apply(ctx.recipe, wanted[3], *ctx.saved_tensors, dout, dlse)
        return *(gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True)), None, None


class PackedAttention(torch.autograd.Function):
    """The same of packed sequences; keeps also what says where they are."""

    @staticmethod
    def forward(ctx, q, k, v, sink, alibi_slopes, recipe, *lengths):
        out, lse = launch_packed.execute(recipe, q, k, v, lengths, sink=sink, alibi_slopes=alibi_slopes)
        ctx.save_for_backward(q, k, v, out, lse, sink, alibi_slopes, *lengths)
        ctx.recipe = recipe.gradients
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        nothing = (None,) * 6  # of slopes, recipe and lengths
        if dout is None and dlse is None:
            return *(None,) * 4, *nothing
        wanted = ctx.needs_input_grad[:4]
        gradients = PackedAttentionGradients.apply(ctx.recipe, wanted[3], dout, dlse, *ctx.saved_tensors)
        return *(gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True)), *nothing


class AttentionGradients(torch.autograd.Function):
    """The backward as a node, so that under create_graph a second derivative is refused.

    torch's once_differentiable refuses it only where dout or dlse requires grad; after ``out.sum()`` neither does, and
    what the gradients owe to q, k and v would silently be missing.
    """

    @staticmethod
    def forward(ctx, recipe, want_sink, q, k, v, out, lse, sink, alibi_slopes, dout, dlse):
        hook = {"sink": sink if want_sink else None, "alibi_slopes": alibi_slopes}
        return launch_backward.execute(recipe, q, k, v, out, lse, dout, dlse, **hook)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("attention can be differentiated once only (second derivatives are not built)")


class PackedAttentionGradients(torch.autograd.Function):
    """The same of packed sequences."""

    @staticmethod
    def forward(ctx, recipe, want_sink, dout, dlse, q, k, v, out, lse, sink, alibi_slopes, *lengths):
        hook = {"sink": sink if want_sink else None, "alibi_slopes": alibi_slopes}
        return launch_packed.execute_backward(recipe, q, k, v, out, lse, lengths, dout, dlse, **hook)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("attention can be differentiated once only (second derivatives are not built)")
