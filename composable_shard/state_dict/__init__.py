"""Save and load by FQN: model and optimizer state, full or sharded.

Read `api`, `model_state` and `optimizer_state` first.
"""

from composable_shard.state_dict import json_tree
from composable_shard.state_dict.api import (
    check_values,
    get_model_state_dict,
    get_optimizer_state_dict,
    iter_full_params,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from composable_shard.state_dict.full_values import Shares, gather_full
from composable_shard.state_dict.model_state import (
    adopt_new_data,
    load_values,
    materialize,
    runs_own_code,
    show_shards,
)
from composable_shard.state_dict.model_tensors import (
    ManagedParam,
    ModelRanks,
    ModelTensors,
    OtherTensor,
    canonical,
    extra_state_name,
    handles_of,
    is_extra_state,
    mesh_groups,
    params_by_fqn,
)
from composable_shard.state_dict.optimizer_state import (
    Group,
    keeps_tensors,
    own_tensors,
    prepare_load,
    view_optimizers,
)
from composable_shard.state_dict.torch_calls import check_torch_call, show_whole_values
