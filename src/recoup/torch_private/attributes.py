"""Private attributes of torch's objects that are used, with the reason."""

from __future__ import annotations

__all__ = ["ATTRIBUTES"]

ATTRIBUTES: dict[str, dict[str, str]] = {
    "Tensor": {
        "_version": "tells that a tensor was changed in place",
        "_base": "whose view it is",
        "_backward_hooks": "hooks that a replay must not register a second time",
        "_post_accumulate_grad_hooks": "the same; optimizers that step inside the backward",
        "_indices": "the bytes of a sparse tensor, without coalescing it",
        "_values": "the same",
    },
    "UntypedStorage": {"_cdata": "its identity: two Python objects may stand for one storage"},
    "Module": {
        "_parameters": "in place, while a slice or a replay stands in for them",
        "_buffers": "the same",
        "_modules": "the same; and under _orig_mod what torch.compile wrapped",
        "_non_persistent_buffers_set": "put back after a run that must leave no trace",
        "_is_full_backward_hook": "the same",
        "_forward_pre_hooks": "code that runs with the module; put back",
        "_forward_pre_hooks_with_kwargs": "put back",
        "_forward_hooks": "code that runs with the module; put back",
        "_forward_hooks_with_kwargs": "put back",
        "_forward_hooks_always_called": "put back",
        "_backward_pre_hooks": "put back",
        "_backward_hooks": "put back",
        "_compiled_call_impl": "what Module.compile sets",
        "_replicate_for_data_parallel": "refused: a replica shares the stand-in of its original",
        "_call_impl": "left out where an error names the user's line",
        "_wrapped_call_impl": "the same",
    },
    "Node": {
        "_saved_result": "what `describe` reads, for every saved tensor",
        "_raw_saved_result": "whether a node saved anything",
    },
    "OpOverload": {
        "_schema": "which arguments an operation writes to, and its name",
        "_overloadpacket": "the key of torch's FLOP formulas",
    },
    "function": {
        "_dynamo_marked_constant": "what `torch.compiler.assume_constant_result` sets",
        "_torchdynamo_orig_callable": "what `torch.compile` was given",
    },
    "Optimizer": {"_optimizer_step_pre_hooks": "a copy of an optimizer starts without hooks"},
    "FSDPModule": {
        "_get_fsdp_state": "who gathers a module's parameters, when and how: all of it is private"
    },
    "FSDPState": {
        "_is_root": "made sure of before anything is put back",
        "_lazy_init": "the same",
        "_state_ctx": "which module began this forward; forgotten after a run that did not end",
        "_comm_ctx": "buffers that outlive a gather; freed after such a run",
        "_training_state": "put back after such a run",
        "_register_pre_backward_hook": "off while units run one at a time",
        "_modules_to_run_forward": "cleared after a run that did not end",
        "_states_to_forward_prefetch": "what the user has gathered ahead",
        "_states_to_backward_prefetch": "the same",
    },
    "FSDPParamGroup": {
        "_register_post_backward_hook": "off while units run one at a time",
        "_record_post_forward": "the same",
        "_reshard_after_forward": "whether parameters stay between forward and backward",
        "_use_post_forward_mesh": "whether larger shards stay between forward and backward",
        "_all_gather_comm": "replaced while units run one at a time: no rank waits for another one",
        "_all_gather_result": "dropped after a run that did not end",
        "_all_gather_process_group": "how many ranks share the parameters",
        "_post_forward_indices": "cleared after a run that did not end",
        "_to_sharded": "frees gathered parameters while resharding is off",
        "_training_state": "put back after a run that did not end",
    },
    "FSDPParam": {
        "_unsharded_param": "what stands in for a parameter while it is gathered",
        "_unsharded_inner_tensors": "memory of gathered parameters",
        "_orig_size": "its size when it is gathered",
        "_module_info": "where it is used",
    },
    "TorchDispatchMode": {"_should_skip_dynamo": "overridden, as asking takes longer than most operations"},
}
"""By type."""
