"""For every class of error, code that raises it and prints it, as errors.md shows it."""

EXAMPLES = {
    "LayoutError": """
import weft
from weft import P, S, lang, schedule

try:
    weft.trace(lambda x: x + 1.0, weft.Mesh(dp=2), x=lang.f32(4, dp=S(1)))
except weft.WeftError as e:
    print(e)
""",
    "TypeMismatch": """
try:
    weft.trace(lambda x: lang.relu(x), weft.Mesh(dp=2), x=lang.f32(4, dp=P()))
except weft.WeftError as e:
    print(e)
""",
    "InvalidProgram": """
p = weft.trace(lambda a, b: a + b, weft.Mesh(dp=2), a=lang.f32(4), b=lang.f32(4))
try:
    weft.interp.run(p, {})
except weft.WeftError as e:
    print(e)
""",
    "ParseError": """
try:
    lang.parse("program p(dp=2)\\n  %x = input()   f32[4] dp:Q\\n  return out=%x")
except weft.WeftError as e:
    print(e)
""",
    "InvalidTransform": """
p = weft.trace(lambda g: lang.relu(lang.all_reduce(g, "dp")), weft.Mesh(dp=2), g=lang.f32(4, dp=P()))
try:
    schedule.delay(p, "all_reduce")
except weft.WeftError as e:
    print(e)
""",
    "AmbiguousPlace": """
p = weft.trace(lambda x: lang.exp(lang.exp(x)), weft.Mesh(dp=2), x=lang.f32(4))
try:
    p.find("exp")
except weft.WeftError as e:
    print(e)
""",
    "UnknownName": """
try:
    lang.tensor("float", 4)
except weft.WeftError as e:
    print(e)
""",
    "OpDefinitionError": """
from weft.ops.registry import Kind

try:
    lang.define("twice", kind=Kind.POINTWISE, run=lambda x: 2 * x)
except weft.WeftError as e:
    print(e)
""",
    "NotDifferentiable": """
p = weft.trace(lambda x: lang.sum(lang.cast(x > 0.0, "i64")), weft.Mesh(dp=2), x=lang.f32(4))
try:
    lang.grad(p)
except weft.WeftError as e:
    print(e)
""",
    "CaptureError": """
import torch


class Branch(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


try:
    weft.capture(Branch(2, 2), torch.ones(1, 2))
except weft.WeftError as e:
    print(e)
""",
    "PlanError": """
model = torch.nn.Linear(4, 4)
try:
    weft.parallelize(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), torch.ones(2, 4), plan="dp2,fast")
except weft.WeftError as e:
    print(e)
""",
    "ClusterError": """
from weft.cluster.spec import cluster

try:
    cluster("8 x H100")
except weft.WeftError as e:
    print(e)
""",
    "StructureError": """
from weft import dynamic

try:
    dynamic.edges([(2, [(0, 5)])])
except weft.WeftError as e:
    print(e)
""",
    "RuleError": """
from weft.rewrite.rulefile import parse_rule

try:
    parse_rule("half: x + y")
except weft.WeftError as e:
    print(e)
""",
    "NoSuchMethod": """
try:
    weft.trace(lambda x: x.exp(), weft.Mesh(dp=2), x=lang.f32(4))
except weft.WeftError as e:
    print(e)
""",
    "RuntimeFault": """
step = weft.parallelize(model, lambda m, b: m(b["x"]).sum(), torch.optim.SGD(model.parameters()), {"x": torch.ones(2, 4)}, plan="dp1")
try:
    step({"y": torch.ones(2, 4)})
except weft.WeftError as e:
    print(e)
""",
}
