"""Fields on a grid or at points, such as velocity and height of water: a task, data, settings, and three families.

    lct train examples/fields/unet.toml --ngpu 2 --parallelism.domain_parallel_degrees 2

The files have `job.imports = ["examples.fields"]`. See README.md here.
"""

from examples.fields.nat_args import FLAVORS as NAT
from examples.fields.points_args import FLAVORS as POINTS
from examples.fields.settings import Fields
from examples.fields.spec import FieldSpec
from examples.fields.unet_args import FLAVORS as UNET
from trainer.extensions import register_model, register_table, register_task

register_table("fields", Fields)
register_task(FieldSpec(), datasets=("fields",))
register_model("unet", UNET, spec="examples.fields.unet")
register_model("nat", NAT, spec="examples.fields.nat")
register_model("points", POINTS, spec="examples.fields.points")
