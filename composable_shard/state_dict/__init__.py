"""Save and load by FQN: model and optimizer state, full or sharded.

Read `model_dict`, `model_state` and `optimizer_reading` first.
"""

from composable_shard.state_dict import json_tree
from composable_shard.state_dict.model_dict import (
    check_values,
    converted,
    get_model_state_dict,
    set_model_state_dict,
)
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
    ParamNames,
    canonical,
    extra_state_name,
    handles_of,
    is_extra_state,
    mesh_groups,
    params_by_fqn,
    prefixed_modules,
)
from composable_shard.state_dict.nested_state import Cuts, why_unsaved
from composable_shard.state_dict.optimizer_groups import Group, own_tensors, view_optimizers
from composable_shard.state_dict.optimizer_loading import (
    keeps_tensors,
    prepare_load,
    set_optimizer_state_dict,
)
from composable_shard.state_dict.optimizer_reading import (
    check_optimizers,
    get_optimizer_state_dict,
    read_named_states,
)
from composable_shard.state_dict.param_iteration import iter_full_params
from composable_shard.state_dict.torch_calls import check_torch_call, show_whole_values
