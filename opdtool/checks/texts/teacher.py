"""Checks and known faults: rebuilt teacher logits."""

from opdtool.checks.registry import CheckInfo, FaultInfo

CHECKS: tuple[CheckInfo, ...] = (
    CheckInfo(
        code="OPD501",
        name="logits-finite",
        statement="Every rebuilt teacher logit is finite.",
        why="One NaN or infinity in a teacher's logits makes the loss of its position NaN, and "
        "with it the gradient of the whole batch.",
        cause="Hidden states that overflowed in float16, or a buffer that was never filled.",
        fix="Look at the places listed; dump the hidden states again in bfloat16 or float32.",
    ),
    CheckInfo(
        code="OPD502",
        name="reference-columns",
        statement="The reference has the columns that are rebuilt, in equal shards.",
        why="Every tensor-parallel rank takes the window [rank * V / TP, (rank + 1) * V / TP); "
        "with other widths a rank compares its logits with those of other tokens.",
        cause="One side was padded for tensor parallelism, or split with `torch.chunk`, which "
        "gives uneven parts.",
        fix="Pad both sides alike (`--pad-vocab-to-multiple-of`), or cut both to the vocabulary.",
    ),
    CheckInfo(
        code="OPD503",
        name="logits-match",
        statement="Every recorded logit is within the tolerance of the rebuilt one.",
        why="Logits that are nearly right agree on the likeliest token nearly always, and still "
        "teach another distribution: the loss falls, the student gets worse.",
        cause="The wrong head, teacher, shard, norm or position; see the faults.",
        fix="Follow the diagnosis; without one, begin at the place of the greatest error.",
    ),
    CheckInfo(
        code="OPD504",
        name="logprobs-match",
        statement="Every recorded log-probability is that of the rebuilt logits.",
        why="Policy-gradient terms weigh tokens by these; one shift and every ratio is of another "
        "token.",
        cause="Log-probabilities shifted by one against the tokens, of another model, or taken at "
        "a sampling temperature.",
        fix="Record the log-probability of token t from the logits of position t - 1, untempered.",
    ),
    CheckInfo(
        code="OPD505",
        name="head-identity",
        statement="The heads are those that the reference was made with, each under its index.",
        why="A head that was renamed or swapped teaches from another model, and shapes stay right.",
        cause="Checkpoints listed in another order, or a teacher that was trained on meanwhile.",
        fix="Give each head the index that the manifest beside the reference binds it to.",
    ),
    CheckInfo(
        code="OPD506",
        name="divergence-finite",
        statement="Student and teacher diverge by a finite amount wherever a position counts.",
        why="An infinite divergence is an infinite loss.",
        cause="The student masks tokens with -inf that the teacher gives weight to, or has NaN.",
        fix="Mask both alike, or give the student's masked logits a large negative number.",
    ),
)

_RECONSTRUCT = ("reconstruct",)

FAULTS: tuple[FaultInfo, ...] = (
    FaultInfo(
        name="vocab-window-shifted",
        statement="Each column holds the logit of another column, a fixed distance away.",
        why="Every probability is given to the wrong token.",
        cause="`start = (rank + 1) * V_local`, the padded V_local on one side alone, or special "
        "tokens counted from the front.",
        fix="Take columns [rank * V_local, (rank + 1) * V_local) of the whole vocabulary.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="head-transposed",
        statement="The hidden states were multiplied by the head instead of by its transpose.",
        why="The logits are noise; only a square head lets it pass unnoticed.",
        cause="`hidden @ weight` for a weight stored as [V, H].",
        fix="Use `hidden @ weight.t()`, or torch.nn.functional.linear.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="single-head-for-all",
        statement="All rows went through one teacher's head, whatever teacher they name.",
        why="Rows of the other teachers are taught by a head that never saw such hidden states.",
        cause="`weights[0]`, or an index that was dropped on the way.",
        fix="Route every row by opd_full_teacher_index.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="teachers-misrouted",
        statement="Rows went through the heads of other teachers than they name.",
        why="Each teacher's hidden states are read by another's head: plausible, and wrong.",
        cause="Heads loaded in another order than teachers are numbered, or an index that was "
        "not permuted with the rows.",
        fix="Bind each head to its index when it is loaded, and move the index with the rows.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="sequence-shifted",
        statement="Each position holds the logits of another, a fixed distance away.",
        why="The student learns to predict a token from the distribution of its neighbour.",
        cause="Hidden states or logits shifted to match labels that were shifted already.",
        fix="Leave logits at the position that made them; shift labels and masks alone.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="logits-scaled",
        statement="All logits are multiplied by one factor.",
        why="The teacher's distribution is sharper or flatter than it is.",
        cause="A temperature or a model's logit scale that only one side applies.",
        fix="Apply it on both sides (`--logit-scale`), or divide the temperature out.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="logits-softcapped",
        statement="The logits went through cap * tanh(logit / cap).",
        why="The most certain tokens are the most flattened.",
        cause="The model caps its logits behind the head; the rebuilding side does not.",
        fix="Pass `--logit-softcap CAP`, and cap in the training loop too.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="log-probs-not-logits",
        statement="Log-probabilities were recorded as logits.",
        why="A softmax gives the same distribution, but a temperature, a softcap or a sum over "
        "shards of the vocabulary does not.",
        cause="`log_softmax` before the transport, as scoring endpoints return them.",
        fix="Record the logits, or compare log-probabilities with `--logprobs`.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="norm-missing",
        statement="The payload was taken before the final norm, and no norm was applied to it.",
        why="The head reads vectors of the wrong length and direction; the likeliest token often "
        "stays the same.",
        cause="A hook on the last layer instead of on the final norm.",
        fix="Dump behind the norm, or apply it: `--norm PATH`.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="norm-applied-twice",
        statement="The final norm was applied to hidden states that were normed already.",
        why="The norm's weight counts twice: each dimension is stretched once too often.",
        cause="A dump taken behind the norm, rebuilt with a module that holds norm and head.",
        fix="Apply the norm on one side alone; leave out `--norm` for such dumps.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="vocab-padded",
        statement="One side has columns that only pad the vocabulary: one value at every position, "
        "or rows of zeros in the head; likely, where they hold anything else and are few.",
        why="Padding inside a softmax takes probability from real tokens.",
        cause="An embedding padded for tensor parallelism, exported with its padding on one side.",
        fix="Cut both sides to the vocabulary, or pad both (`--pad-vocab-to-multiple-of`).",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="rounding-only",
        statement="The sides differ by no more than what the reference's dtype rounds away; not "
        "said where a tolerance was given.",
        why="Nothing is wrong; exact equality was not to be had.",
        cause="Logits stored in bfloat16 or float16.",
        fix="Nothing to mend; store float32 where the last bits matter.",
        commands=_RECONSTRUCT,
    ),
    FaultInfo(
        name="tp-shards-uneven",
        statement="The vocabulary was cut into shards of different widths.",
        why="Ranks that take equal windows read their neighbours' columns.",
        cause="`torch.chunk`, or a remainder given to the last rank.",
        fix="Pad the vocabulary to a multiple of TP, then cut equal windows.",
        commands=_RECONSTRUCT,
    ),
)
