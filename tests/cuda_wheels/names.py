"""Names of vLLM, SGLang, torch and transformers that skyrl_train uses without importing them, by file of skyrl_train.

A row is a Python expression:

- `package.Class.name`: the attribute exists in the class, or its methods assign it.
- `package.function(_, second, key=_)`: the function can be called in this way. A positional argument other than `_` is
  the name of the parameter, and `...` at the beginning stands for further arguments.
- `"name" in package.TABLE`: an entry of the table is this name or starts with it.

Imported names are read from the files; see touched.py.
"""

from __future__ import annotations

VLLM = {
    "experiment/engines.py": """
        vllm.EngineArgs(..., enable_prefix_caching=_, enable_chunked_prefill=_, max_num_batched_tokens=_)
        vllm.EngineArgs(..., dtype=_, max_num_seqs=_, gpu_memory_utilization=_, tensor_parallel_size=_, enforce_eager=_)
        vllm.EngineArgs(..., nnodes=_, node_rank=_, master_addr=_, master_port=_)
    """,
    "engines/vllm/arguments.py": """
        vllm.EngineArgs(..., model=_, tensor_parallel_size=_, enable_expert_parallel=_, enable_lora=_, max_lora_rank=_)
        vllm.EngineArgs(..., logprobs_mode=_, worker_extension_cls=_, async_scheduling=_, disable_log_stats=_, seed=_)
        vllm.EngineArgs(..., generation_config=_, trust_remote_code=_, hf_overrides=_, distributed_executor_backend=_)
        vllm.EngineArgs(..., enable_sleep_mode=_, enforce_eager=_, max_model_len=_, kv_cache_memory_bytes=_)
        vllm.EngineArgs(..., language_model_only=_)
        vllm.EngineArgs(..., nnodes=_, disable_custom_all_reduce=_)
        vllm.EngineArgs(..., enable_return_routed_experts=_, enable_prefix_caching=_)
        vllm.SamplingParams(..., max_tokens=_, temperature=_, top_p=_, top_k=_, min_p=_, repetition_penalty=_)
        vllm.SamplingParams(..., min_tokens=_, stop=_, stop_token_ids=_, ignore_eos=_, seed=_, logprobs=_)
        vllm.SamplingParams(..., output_kind=_, flat_logprobs=_, detokenize=_, skip_special_tokens=_)
        vllm.SamplingParams(..., structured_outputs=_)
        vllm.sampling_params.StructuredOutputsParams(json=_)
        vllm.EngineArgs(..., max_logprobs=_, structured_outputs_config=_)
        vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        vllm.transformers_utils.model_arch_config_convertor.ModelArchConfigConvertorBase(hf_config, hf_text_config)
        vllm.transformers_utils.model_arch_config_convertor.ModelArchConfigConvertorBase.get_num_experts(self)
        vllm.envs.VLLM_BATCH_INVARIANT
        vllm.v1.engine.llm_engine.LLMEngine.from_engine_args(engine_args)
    """,
    "engines/vllm/engine.py": """
        vllm.EngineArgs.create_engine_config(self, headless=_)
        vllm.v1.executor.multiproc_executor.MultiprocExecutor(vllm_config, monitor_workers=_)
        vllm.v1.executor.multiproc_executor.MultiprocExecutor.start_worker_monitor(self, inline=_)
        vllm.SamplingParams(..., max_tokens=_, temperature=_, prompt_logprobs=_, flat_logprobs=_, detokenize=_)
        vllm.inputs.tokens_input(prompt_token_ids, cache_salt=_)
        vllm.v1.engine.llm_engine.LLMEngine.collective_rpc(self, method, args=_, timeout=_)
        vllm.v1.engine.llm_engine.LLMEngine.get_supported_tasks(self)
        vllm.v1.engine.llm_engine.LLMEngine.abort_request(self, request_ids)
        vllm.v1.engine.llm_engine.LLMEngine.step(self)
        vllm.v1.engine.llm_engine.LLMEngine.sleep(self, level=_)
        vllm.v1.engine.llm_engine.LLMEngine.wake_up(self, tags)
        vllm.v1.engine.llm_engine.LLMEngine.engine_core
        vllm.v1.engine.llm_engine.LLMEngine.input_processor
        vllm.v1.engine.llm_engine.LLMEngine.output_processor
        vllm.v1.engine.llm_engine.LLMEngine.model_config
        vllm.v1.engine.llm_engine.LLMEngine.renderer
        vllm.v1.engine.core_client.InprocClient.engine_core
        vllm.v1.engine.core_client.InprocClient.add_request(self, request)
        vllm.v1.engine.core_client.InprocClient.shutdown(self)
        vllm.v1.engine.core.EngineCore.set_weight_version(self, weight_version)
        vllm.v1.engine.core.EngineCore.reset_prefix_cache(self, reset_running_requests=_)
        vllm.v1.engine.core.EngineCore.scheduler
        vllm.v1.engine.core.EngineCore.structured_output_manager
        vllm.v1.structured_output.StructuredOutputManager.backend
        vllm.config.VllmConfig.structured_outputs_config
        vllm.v1.engine.output_processor.RequestState.detokenizer
        vllm.v1.engine.detokenizer.IncrementalDetokenizer.output_token_ids
        vllm.v1.engine.core.EngineCore.batch_queue
        vllm.v1.engine.core.EngineCore.model_executor
        vllm.v1.executor.abstract.Executor.sleeping_tags
        vllm.v1.executor.abstract.Executor.discard(self, tags)
        vllm.v1.core.sched.scheduler.Scheduler.has_unfinished_requests(self)
        vllm.v1.core.sched.scheduler.Scheduler.make_spec_decoding_stats(..., num_draft_tokens=_, num_accepted_tokens=_)
        vllm.config.VllmConfig.speculative_config
        vllm.config.SpeculativeConfig.use_ngram(self)
        vllm.v1.core.sched.scheduler.Scheduler.set_pause_state(self, pause_state)
        vllm.v1.core.sched.scheduler.Scheduler._preempt_request(self, request, timestamp, drop_stale_output=_)
        vllm.v1.core.sched.scheduler.Scheduler.prev_step_scheduled_req_ids
        vllm.v1.core.sched.scheduler.Scheduler.running
        vllm.v1.core.sched.scheduler.Scheduler.max_num_running_reqs
        vllm.config.VllmConfig.use_v2_model_runner
        vllm.SamplingParams.all_stop_token_ids
        vllm.v1.core.sched.scheduler.Scheduler.waiting
        vllm.v1.core.sched.scheduler.Scheduler.policy
        vllm.v1.core.sched.interface.PauseState.PAUSED_ALL
        vllm.v1.core.sched.interface.PauseState.UNPAUSED
        vllm.v1.core.sched.request_queue.create_request_queue(policy)
        vllm.v1.engine.input_processor.InputProcessor.process_inputs(
            self, request_id, prompt, params, supported_tasks=_, lora_request=_
        )
        vllm.v1.engine.input_processor.InputProcessor.assign_request_id(request)
        vllm.v1.engine.output_processor.OutputProcessor.add_request(self, request, prompt, queue=_)
        vllm.v1.engine.output_processor.OutputProcessor.request_states
        vllm.v1.engine.output_processor.RequestState.detokenizer
        vllm.v1.engine.output_processor.RequestState.logprobs_processor
        vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer.min_tokens
        vllm.v1.engine.EngineCoreRequest.request_id
        vllm.v1.engine.EngineCoreRequest.sampling_params
        vllm.SamplingParams.prompt_logprobs
        vllm.v1.engine.EngineCoreRequest.cache_salt
        vllm.v1.engine.EngineCoreRequest.lora_request
        vllm.v1.request.Request.request_id
        vllm.v1.request.Request.lora_request
        vllm.v1.request.Request.cache_salt
        vllm.v1.request.Request.block_hashes
        vllm.v1.request.Request.update_block_hashes(self)
        vllm.config.ModelConfig.max_model_len
        vllm.config.ModelConfig.get_vocab_size(self)
        vllm.renderers.base.BaseRenderer.tokenizer
        vllm.lora.request.LoRARequest.lora_int_id
        vllm.outputs.RequestOutput.num_cached_tokens
    """,
    "engines/vllm/requests.py": """
        vllm.outputs.CompletionOutput(index, text, token_ids, cumulative_logprob, logprobs, finish_reason=_)
        vllm.outputs.CompletionOutput.stop_reason
        vllm.outputs.CompletionOutput.weight_versions
        vllm.outputs.CompletionOutput.routed_experts
        vllm.outputs.WeightVersionSpan.start
        vllm.outputs.WeightVersionSpan.end
        vllm.outputs.WeightVersionSpan.version
        vllm.outputs.RequestOutput(request_id, prompt, prompt_token_ids, prompt_logprobs, outputs, finished=_)
        vllm.outputs.RequestOutput.prompt_logprobs
        vllm.v1.engine.logprobs.LogprobsProcessor.update_from_output(self, output)
        vllm.v1.engine.EngineCoreOutput.new_logprobs
        vllm.v1.outputs.LogprobsLists.logprobs
        vllm.v1.outputs.LogprobsLists.logprob_token_ids
    """,
    "engines/vllm/grammars.py": """
        vllm.v1.structured_output.backend_guidance.GuidanceBackend(vllm_config, tokenizer, vocab_size)
        vllm.v1.structured_output.backend_guidance.GuidanceBackend.is_tokenizer_supported(tokenizer)
        vllm.v1.structured_output.backend_guidance.GuidanceBackend._build_ll_tokenizer(tokenizer, vocab_size)
        vllm.utils.mistral.is_mistral_tokenizer(obj)
    """,
    "engines/vllm/adapters.py": """
        vllm.lora.request.LoRARequest(lora_name, lora_int_id, lora_path, load_inplace=_)
        vllm.v1.engine.llm_engine.LLMEngine.vllm_config
        vllm.v1.engine.llm_engine.LLMEngine.add_lora(self, lora_request)
        vllm.v1.engine.llm_engine.LLMEngine.remove_lora(self, lora_id)
        vllm.config.VllmConfig.lora_config
        vllm.config.ModelConfig.model
    """,
    "engines/vllm/worker.py": """
        vllm.v1.worker.gpu.model_runner.GPUModelRunner.main_stream
        vllm.v1.worker.gpu_worker.Worker.model_runner
        vllm.v1.worker.gpu_worker.Worker.use_v2_model_runner
        vllm.v1.worker.gpu_worker.Worker.model_config
        vllm.v1.worker.gpu_worker.Worker.lora_config
        vllm.v1.worker.gpu_worker.Worker.device
        vllm.v1.worker.gpu_worker.Worker.rank
        vllm.v1.worker.gpu_model_runner.GPUModelRunner.model
        vllm.v1.worker.gpu_model_runner.GPUModelRunner.sampler
        vllm.config.ModelConfig.dtype
        vllm.config.ModelConfig.hf_text_config
        vllm.config.LoRAConfig.max_lora_rank
        vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA.base_layer
        vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA.punica_wrapper
        vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA._get_logits(..., self, hidden_states, lm_head)
        vllm.model_executor.layers.logits_processor.LogitsProcessor._get_logits(..., self, hidden_states, lm_head)
        vllm.lora.punica_wrapper.punica_base.PunicaWrapperBase.sampler_indices
        vllm.lora.ops.torch_ops.lora_ops.bgmv_shrink(inputs, _, output_tensor, lora_indices_tensor, scaling)
        vllm.lora.punica_wrapper.punica_cpu.bgmv_shrink
        vllm.model_executor.model_loader.reload.layerwise
        vllm.model_executor.model_loader.reload.initialize_layerwise_reload(model)
        vllm.model_executor.model_loader.reload.finalize_layerwise_reload(_, _)
        vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=_)
        vllm.model_executor.layers.linear.UnquantizedLinearMethod
        vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod
        vllm.config.ModelConfig.use_mla
        vllm.config.ModelConfig.is_hybrid
        vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts.moe_config
        vllm.model_executor.layers.fused_moe.config.FusedMoEConfig.intermediate_size_per_partition
        vllm.distributed.get_tensor_model_parallel_rank()
        vllm.model_executor.models.gpt_oss.OAIAttention.sinks
        vllm.model_executor.models.gpt_oss.OAIAttention.attn
        vllm.model_executor.layers.attention.Attention.impl
        vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.sinks
        vllm.v1.attention.backends.flash_attn.FlashAttentionImpl.sinks
        vllm.v1.attention.backends.triton_attn.TritonAttentionImpl.sinks
    """,
    "engines/vllm/sampler.py": """
        vllm.v1.worker.gpu_model_runner.GPUModelRunner.sampler
        vllm.v1.worker.gpu_model_runner.GPUModelRunner.input_batch
        vllm.v1.worker.gpu_model_runner.GPUModelRunner.speculative_config
        vllm.v1.worker.gpu_model_runner.GPUModelRunner.device
        vllm.v1.worker.gpu_model_runner.apply_grammar_bitmask(scheduler_output, grammar_output, input_batch, logits)
        vllm.v1.worker.gpu_input_batch.InputBatch.logitsprocs
        vllm.v1.sample.logits_processor.LogitsProcessors.argmax_invariant
        vllm.v1.sample.logits_processor.LogitsProcessors.non_argmax_invariant
        vllm.v1.sample.logits_processor.MinTokensLogitsProcessor.min_toks
        vllm.v1.sample.logits_processor.LogitBiasLogitsProcessor.biases
        vllm.v1.sample.logits_processor.builtin.process_dict_updates(req_entries, batch_update, new_state)
        vllm.SamplingParams.extra_args
        vllm.v1.sample.sampler.Sampler(logprobs_mode)
        vllm.v1.sample.sampler.Sampler.forward(self, logits, sampling_metadata)
        vllm.v1.sample.sampler.Sampler.apply_logits_processors(self, logits, sampling_metadata, predict_bonus_token=_)
        vllm.v1.sample.metadata.SamplingMetadata.no_penalties
        vllm.v1.sample.metadata.SamplingMetadata.bad_words_token_ids
        vllm.v1.sample.metadata.SamplingMetadata.allowed_token_ids_mask
        vllm.v1.sample.metadata.SamplingMetadata.thinking_budget_state_holder
        vllm.v1.sample.metadata.SamplingMetadata.max_num_logprobs
        vllm.v1.sample.metadata.SamplingMetadata.logitsprocs
        vllm.v1.outputs.SamplerOutput(sampled_token_ids, logprobs_tensors)
        vllm.v1.outputs.LogprobsTensors(logprob_token_ids, logprobs, selected_token_ranks)
    """,
    "engines/vllm/model_runner.py": """
        vllm.envs.disable_envs_cache()
        "VLLM_USE_V2_MODEL_RUNNER" in vllm.envs.environment_variables
        vllm.EngineArgs(..., logits_processors=_)
    """,
    "engines/vllm/sampler_v2.py": """
        vllm.v1.worker.gpu.model_runner.GPUModelRunner.sampler
        vllm.v1.worker.gpu.model_runner.GPUModelRunner.speculative_config
        vllm.v1.worker.gpu.model_runner.GPUModelRunner.structured_outputs_worker
        vllm.v1.worker.gpu.model_runner.GPUModelRunner.rejection_sampler
        vllm.config.SpeculativeConfig.rejection_sample_method
        vllm.config.SpeculativeConfig.enable_adaptive_verification
        vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__call__(
            self, logits, input_batch, draft_logits, invalid_drafts
        )
        vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.sampler
        vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.num_speculative_steps
        vllm.v1.worker.gpu.spec_decode.rejection_sampler.get_max_chunk_logits(vocab_size)
        vllm.v1.worker.gpu.spec_decode.rejection_sampler.gather_draft_sampled(
            input_ids, positions, logits_indices, expanded_idx_mapping, expanded_local_pos, prefill_len
        )
        vllm.v1.outputs.LogprobsTensors.cat(tensors, cu_num_generated_tokens)
        vllm.v1.worker.gpu.structured_outputs.StructuredOutputsWorker.apply_grammar_bitmask(
            self, logits, input_batch, grammar_req_ids, grammar_bitmask
        )
        vllm.v1.worker.gpu.sample.sampler.Sampler.__call__(self, logits, input_batch)
        vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params(
            self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos,
            seq_lens_upper_bound_np
        )
        vllm.v1.worker.gpu.sample.sampler.Sampler.sampling_states
        vllm.v1.worker.gpu.sample.sampler.Sampler.use_fp64_gumbel
        vllm.v1.worker.gpu.sample.sampler.Sampler.req_states
        vllm.v1.worker.gpu.states.RequestState.prefill_len
        vllm.v1.worker.gpu.sample.states.SamplingStates.add_request(self, req_idx, sampling_params)
        vllm.v1.worker.gpu.sample.states.SamplingStates.apply_min_p(self, logits, expanded_idx_mapping, idx_mapping_np)
        vllm.v1.worker.gpu.sample.states.SamplingStates.apply_top_k_top_p(
            self, logits, expanded_idx_mapping, idx_mapping_np
        )
        vllm.v1.worker.gpu.sample.states.SamplingStates.get_top_k_top_p(self, expanded_idx_mapping, idx_mapping_np)
        vllm.v1.worker.gpu.sample.states.SamplingStates.max_num_logprobs(self, idx_mapping_np)
        vllm.v1.worker.gpu.sample.states.SamplingStates.temperature
        vllm.v1.worker.gpu.sample.states.SamplingStates.seeds
        vllm.v1.worker.gpu.sample.states.SamplingStates.min_p
        vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p)
        vllm.v1.worker.gpu.sample.gumbel.gumbel_sample(
            logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=_, is_drafting=_, use_fp64=_
        )
        vllm.v1.worker.gpu.input_batch.get_num_sampled_and_rejected(
            num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len
        )
        vllm.v1.worker.gpu.sample.output.SamplerOutput(
            sampled_token_ids=_, logprobs_tensors=_, num_nans=_, num_sampled=_, num_rejected=_
        )
    """,
    "engines/vllm/drafts.py": """
        vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.sample_draft(
            self, hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step, draft_logits,
            spec_step_idx
        )
        vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.compute_draft_logits(
            self, hidden_states, spec_step_idx
        )
        vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.use_fp64_gumbel
    """,
    "engines/http/native_servers.py": """
        vllm.entrypoints.openai.completion.protocol.CompletionRequest(..., model=_, prompt=_, return_token_ids=_)
        vllm.entrypoints.openai.completion.protocol.CompletionRequest(..., skip_special_tokens=_, top_p=_, top_k=_)
        vllm.entrypoints.openai.completion.protocol.CompletionRequest(..., min_p=_, repetition_penalty=_, request_id=_)
        vllm.entrypoints.openai.completion.protocol.CompletionRequest(..., seed=_, max_tokens=_, temperature=_, stop=_)
        vllm.entrypoints.openai.completion.protocol.CompletionRequest(..., stop_token_ids=_, ignore_eos=_)
        vllm.entrypoints.openai.completion.protocol.CompletionRequest(..., logprobs=_, prompt_logprobs=_)
        "/v1/completions" in vllm.entrypoints.openai.completion.api_router.router
        "/v1/models" in vllm.entrypoints.openai.models.api_router.router
        "/version" in vllm.entrypoints.serve.instrumentator.basic.router
        "/health" in vllm.entrypoints.serve.instrumentator.health.router
        "/reset_prefix_cache" in vllm.entrypoints.serve.dev.cache.api_router.router
        "/collective_rpc" in vllm.entrypoints.serve.dev.rpc.api_router.router
        "/sleep" in vllm.entrypoints.serve.dev.sleep.api_router.router
        "/wake_up" in vllm.entrypoints.serve.dev.sleep.api_router.router
        "/is_paused" in vllm.entrypoints.rl.online.api_router.router
        "/abort_requests" in vllm.entrypoints.rl.online.api_router.router
        vllm.v1.worker.gpu_worker.Worker.reload_weights
    """,
    # SGLang requires an earlier transformers without these.
    "models/layer_sizes.py": """
        transformers.PreTrainedConfig.is_heterogeneous
        transformers.PreTrainedConfig.per_layer_config
    """,
}

SGLANG = {
    "engines/sglang/arguments.py": """
        sglang.srt.server_args.ServerArgs(..., tp_size=_, ep_size=_, disable_cuda_graph=_, mem_fraction_static=_)
        sglang.srt.server_args.ServerArgs(..., model_path=_, device=_, dtype=_, context_length=_)
        sglang.srt.server_args.ServerArgs(..., max_running_requests=_, skip_tokenizer_init=_)
        sglang.srt.server_args.ServerArgs(..., sampling_backend=_, weight_version=_)
        sglang.srt.server_args.ServerArgs(..., trust_remote_code=_, grammar_backend=_, log_level=_, sleep_on_idle=_)
        sglang.srt.server_args.ServerArgs(..., random_seed=_, json_model_override_args=_, enable_lora=_)
        sglang.srt.server_args.ServerArgs(..., max_lora_rank=_, lora_target_modules=_, enable_memory_saver=_)
        sglang.srt.server_args.ServerArgs(..., disable_radix_cache=_, max_prefill_tokens=_)
        sglang.srt.server_args.ServerArgs(..., chunked_prefill_size=_, attention_backend=_)
        sglang.srt.server_args.ServerArgs(..., disable_overlap_schedule=_, max_total_tokens=_)
        sglang.srt.server_args.ServerArgs(..., enable_deterministic_inference=_, enable_return_routed_experts=_)
    """,
    "engines/sglang/engine.py": """
        sglang.srt.managers.tokenizer_manager.TokenizerManager.max_req_input_len
    """,
    "engines/sglang/processes.py": """
        sglang.srt.entrypoints.engine.Engine.run_scheduler_process_func
        sglang.srt.entrypoints.engine.Engine.init_tokenizer_manager_func
        sglang.srt.entrypoints.engine.init_tokenizer_manager(server_args, port_args, TokenizerManagerClass=_)
        sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses
        sglang.srt.entrypoints.engine.Engine.tokenizer_manager
        sglang.srt.entrypoints.engine.Engine.send_to_rpc
        sglang.srt.entrypoints.engine.Engine.shutdown(self)
        sglang.srt.entrypoints.engine.Engine._scheduler_init_result
        sglang.srt.managers.tokenizer_manager.TokenizerManager._subprocess_watchdog
        sglang.srt.managers.tokenizer_manager.TokenizerManager.event_loop
        sglang.srt.managers.tokenizer_manager.TokenizerManager.handle_loop(self)
        sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler(self, obj)
        sglang.srt.managers.tokenizer_manager.TokenizerManager.recv_from_detokenizer
        sglang.srt.managers.tokenizer_manager.TokenizerManager.send_to_scheduler
        sglang.srt.managers.io_struct.ShutdownReq()
        sglang.srt.environ.envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN
    """,
    "engines/sglang/front_end.py": """
        sglang.srt.managers.io_struct.TokenizedGenerateReqInput
        sglang.srt.managers.io_struct.BatchTokenizedGenerateReqInput(batch=_)
        sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler(self, obj)
        sglang.srt.managers.tokenizer_manager.TokenizerManager._async_dispatch_to_scheduler(self, obj)
    """,
    "engines/sglang/requests.py": """
        sglang.srt.managers.io_struct.GenerateReqInput(..., rid=_, input_ids=_, sampling_params=_, return_logprob=_)
        sglang.srt.managers.io_struct.GenerateReqInput(..., logprob_start_len=_, return_sampling_mask=_, lora_path=_)
        sglang.srt.managers.io_struct.GenerateReqInput(..., return_routed_experts=_)
        sglang.srt.managers.io_struct.ContinueGenerationReqInput(torch_empty_cache=_)
        sglang.srt.managers.io_struct.PauseGenerationReqInput(mode=_)
        sglang.srt.managers.io_struct.UpdateWeightVersionReqInput(new_version=_)
        sglang.srt.managers.io_struct.LoadLoRAAdapterReqInput(lora_name=_, lora_path=_)
        sglang.srt.managers.io_struct.UnloadLoRAAdapterReqInput(lora_name=_)
        sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request(self, obj)
        sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request(self, rid=_)
        sglang.srt.managers.tokenizer_manager.TokenizerManager.flush_cache(self)
        sglang.srt.managers.tokenizer_manager.TokenizerManager.load_lora_adapter(self, obj)
        sglang.srt.managers.tokenizer_manager.TokenizerManager.unload_lora_adapter(self, obj)
        sglang.srt.managers.tokenizer_manager.TokenizerManager.rid_to_state
        sglang.srt.managers.tokenizer_manager.ReqState.dispatched
        sglang.srt.managers.tokenizer_manager.ReqState.output_ids
        sglang.srt.managers.io_struct.SetInternalStateReq(server_args=_)
        sglang.srt.managers.io_struct.GenerateReqInput(..., top_logprobs_num=_)
        "update_weight_version" in sglang.srt.managers.tokenizer_control_mixin._COMMUNICATOR_SPECS
    """,
    "engines/sglang/weight_store.py": """
        sglang.srt.managers.io_struct.BeginWeightUpdateReqInput()
        sglang.srt.managers.io_struct.EndWeightUpdateReqInput()
        sglang.srt.managers.io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=_, load_format=_, flush_cache=_
        )
        sglang.srt.utils.MultiprocessingSerializer.serialize(obj)
        sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata(
            name, shape, dtype, start_idx=_, end_idx=_, numel=_
        )
        "begin_weight_update" in sglang.srt.managers.tokenizer_control_mixin._COMMUNICATOR_SPECS
        "update_weights_from_tensor" in sglang.srt.managers.tokenizer_control_mixin._COMMUNICATOR_SPECS
        "end_weight_update" in sglang.srt.managers.tokenizer_control_mixin._COMMUNICATOR_SPECS
    """,
    "engines/sglang/scheduler.py": """
        sglang.srt.managers.scheduler.create_load_snapshot_writer
        sglang.srt.managers.scheduler.Scheduler._add_request_to_queue(self, req, is_retracted)
        sglang.srt.managers.scheduler.Scheduler.flush_cache(self, empty_cache)
        sglang.srt.managers.scheduler.Scheduler.is_fully_idle(self, ignore_waiting=_)
        sglang.srt.managers.scheduler.Scheduler.pause_generation(self, recv_req)
        sglang.srt.managers.scheduler.Scheduler.process_batch_result(self, batch, result)
        sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine(self)
        sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle(self)
        sglang.srt.managers.scheduler.Scheduler.abort_request(self, recv_req)
        sglang.srt.managers.scheduler.Scheduler._release_aborted_request(self, req)
        sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort(self)
        sglang.srt.managers.scheduler.Scheduler.collect_inflight_reqs(self)
        sglang.srt.managers.scheduler.Scheduler.ingest_requests(self)
        sglang.srt.managers.scheduler.Scheduler.on_idle(self)
        sglang.srt.managers.scheduler.Scheduler.set_internal_state(self, recv_req)
        sglang.srt.managers.scheduler.Scheduler.cur_batch_for_debug
        sglang.srt.managers.scheduler.Scheduler.enable_overlap
        sglang.srt.managers.scheduler.Scheduler.waiting_queue
        sglang.srt.managers.scheduler.Scheduler.running_batch
        sglang.srt.managers.scheduler.Scheduler.last_batch
        sglang.srt.managers.scheduler.Scheduler.chunked_req
        sglang.srt.managers.scheduler.Scheduler.result_queue
        sglang.srt.managers.scheduler.Scheduler.tree_cache
        sglang.srt.managers.scheduler.Scheduler.output_streamer
        sglang.srt.managers.scheduler.Scheduler.device
        sglang.srt.managers.scheduler.Scheduler._engine_paused
        sglang.srt.managers.scheduler.Scheduler._pending_chunked_abort_req
        sglang.srt.managers.scheduler.run_scheduler_process
        sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output(
            self, reqs, return_logprob
        )
        sglang.srt.managers.schedule_batch.ScheduleBatch(reqs=_, batch_is_full=_)
        sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch(self, chunked_req_to_exclude=_)
        sglang.srt.managers.schedule_batch.ScheduleBatch.merge_batch(self, other)
        sglang.srt.managers.schedule_batch.ScheduleBatch.is_empty(self)
        sglang.srt.managers.schedule_batch.ScheduleBatch.forward_mode
        sglang.srt.model_executor.forward_batch_info.ForwardMode.is_extend(self)
        sglang.srt.managers.schedule_batch.Req.cache_salt
        sglang.srt.managers.schedule_batch.Req.rid
        sglang.srt.managers.schedule_batch.Req.to_finish
        sglang.srt.managers.schedule_batch.Req.stream
        sglang.srt.managers.schedule_batch.Req.finished(self)
        sglang.srt.managers.schedule_batch.Req.finished_reason
        sglang.srt.managers.schedule_batch.Req.return_logprob
        sglang.srt.managers.schedule_batch.FINISH_ABORT()
        sglang.srt.managers.io_struct.AbortReq(rid=_)
        sglang.srt.managers.io_struct.AbortReq.abort_all
        sglang.srt.managers.io_struct.PauseGenerationReqInput(mode=_)
        sglang.srt.mem_cache.common.release_kv_cache(req, tree_cache, is_insert=_)
    """,
    "engines/sglang/sampler.py": """
        sglang.srt.layers.sampler.Sampler()
        sglang.srt.layers.sampler.Sampler.forward
        sglang.srt.layers.sampler.register_sampler_backend(backend, factory)
        sglang.srt.layers.logits_processor.SamplingMaskOutput(
            token_ids=_, lengths=_, selected_logprobs=_, support_logprobs=_, statuses=_
        )
        sglang.srt.layers.logits_processor.SamplingMaskStatus.OK
        sglang.srt.layers.logits_processor.LogitsProcessorOutput.next_token_logits
        sglang.srt.layers.logits_processor.LogitsProcessorOutput.next_token_logprobs
        sglang.srt.layers.logits_processor.LogitsProcessorOutput.sampling_mask_output
        sglang.srt.layers.logits_processor.LogitsProcessorOutput.next_token_top_logprobs_val
        sglang.srt.layers.logits_processor.LogitsProcessorOutput.next_token_top_logprobs_idx
        sglang.srt.managers.schedule_batch.Req.logprob
        sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch(self, batch, vocab_size)
        sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_merge_batch(self, other)
        sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_filter_batch(
            self, keep_indices, keep_indices_device
        )
        sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.custom_params
        sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.device
        sglang.srt.sampling.sampling_params.SamplingParams.custom_params
        sglang.srt.sampling.sampling_params.SamplingParams.max_new_tokens
        sglang.srt.managers.schedule_batch.Req.update_finish_state(self, new_accepted_len)
        sglang.srt.managers.schedule_batch.Req.sampling_params
        sglang.srt.managers.schedule_batch.Req.origin_input_ids
        sglang.srt.managers.schedule_batch.Req.output_ids
        sglang.srt.managers.schedule_batch.Req.return_sampling_mask
        sglang.srt.managers.schedule_batch.FINISH_MATCHED_STR(matched=_)
        sglang.srt.managers.schedule_batch.FINISH_MATCHED_TOKEN(matched=_)
        sglang.srt.managers.schedule_batch.FINISH_LENGTH(length=_)
    """,
    "engines/http/native_servers.py": """
        sglang.srt.managers.io_struct.GenerateReqInput(..., input_ids=_, sampling_params=_, return_logprob=_, rid=_)
        sglang.srt.managers.io_struct.GenerateReqInput(..., logprob_start_len=_)
        sglang.srt.sampling.sampling_params.SamplingParams(..., max_new_tokens=_, temperature=_, stop=_)
        sglang.srt.sampling.sampling_params.SamplingParams(..., stop_token_ids=_, ignore_eos=_, top_p=_, top_k=_)
        sglang.srt.sampling.sampling_params.SamplingParams(..., min_p=_, repetition_penalty=_, skip_special_tokens=_)
        "/server_info" in sglang.srt.entrypoints.http_server.app
        "/ready" in sglang.srt.entrypoints.http_server.app
        "/generate" in sglang.srt.entrypoints.http_server.app
        "/abort_request" in sglang.srt.entrypoints.http_server.app
        "/update_weights_from_disk" in sglang.srt.entrypoints.http_server.app
        "/flush_cache" in sglang.srt.entrypoints.http_server.app
        "/release_memory_occupation" in sglang.srt.entrypoints.http_server.app
        "/resume_memory_occupation" in sglang.srt.entrypoints.http_server.app
    """,
}

TORCH = {
    "models/padding_free.py": """
        torch.UntypedStorage._cdata
        torch._ops.OpOverload._schema
    """,
    "models/ragged_model.py": """
        torch.nn.Module._non_persistent_buffers_set
    """,
    "weight_sync/broadcast.py": """
        torch.distributed.ProcessGroupGloo.create_device(hostname=_, interface=_)
        torch.distributed.TCPStore(
            host_name, port, world_size, is_master=_, timeout=_, wait_for_workers=_, master_listen_fd=_
        )
        torch.distributed.ProcessGroupGloo(store, rank, size, options)
        torch.distributed.ProcessGroupGloo._Options()
        torch.distributed.ProcessGroupGloo._Options._devices
        torch.distributed.ProcessGroupGloo._Options._timeout
        torch.distributed.ProcessGroupGloo.broadcast(self, tensors, opts)
        torch.distributed.ProcessGroupGloo.abort(self)
        torch.distributed.BroadcastOptions.rootRank
        torch.distributed.Work.wait(self, timeout)
        torch.distributed.Work.is_completed(self)
        torch.distributed.TCPStore.check(self, _)
    """,
    "weight_sync/receiver.py": """
        torch._foreach_copy_
    """,
    "weight_sync/ipc.py": """
        torch.multiprocessing.reductions.reduce_tensor(tensor)
        torch.multiprocessing.reductions.rebuild_cuda_tensor(_, _, _, _, _, _, storage_device, _, _, _, _, _, _, _, _)
    """,
    "strategies/fsdp2.py": """
        torch.distributed.device_mesh.init_device_mesh(device_type, mesh_shape, mesh_dim_names=_)
        torch.distributed.fsdp.fully_shard(module, mesh=_, reshard_after_forward=_, mp_policy=_, offload_policy=_)
        torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=_, reduce_dtype=_, cast_forward_inputs=_)
        torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor(self, factor)
        torch.distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms(self, enable)
        torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync(self, requires_gradient_sync)
    """,
    "strategies/base.py": """
        torch.distributed.tensor.DTensor._spec
        torch.nn.Module._apply(self, fn)
        torch._foreach_mul_
        torch._foreach_norm
    """,
    "strategies/muon.py": """
        torch.optim._muon._adjust_lr(lr, adjust_lr_fn, param_shape)
        torch.optim._muon._zeropower_via_newtonschulz(grad, ns_coefficients, ns_steps, eps)
    """,
    "strategies/checkpoint_shards.py": """
        torch.distributed.tensor._utils.compute_local_shape_and_global_offset(global_shape, mesh, placements)
    """,
    "report/profiling.py": """
        torch.cuda.memory._record_memory_history(enabled=_)
        torch.cuda.memory._record_memory_history(max_entries=_)
        torch.cuda.memory._dump_snapshot(filename)
    """,
    "models/flash_attention.py": """
        torch.nn.attention.varlen.varlen_attn(
            query,
            key,
            value,
            cu_seq_q=_,
            cu_seq_k=_,
            max_q=_,
            max_k=_,
            return_aux=_,
            scale=_,
            window_size=_,
            enable_gqa=_,
        )
        torch.nn.attention.varlen.AuxRequest(lse=_)
        torch.nn.attention.varlen._varlen_attn_backward
    """,
    "engines/sglang/weight_store.py": """
        torch.UntypedStorage._new_shared(size)
    """,
    "engines/transformers/model_runner.py": """
        torch.ops.mkldnn._linear_pointwise
    """,
}

TRANSFORMERS = {
    "engines/sglang/processes.py": """
        transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content
        transformers.PreTrainedConfig.standardize_rope_params
    """,
    "engines/transformers/attention.py": """
        transformers.AttentionInterface.register(key, value)
    """,
    "models/padding_free.py": """
        transformers.PreTrainedModel._can_set_attn_implementation()
        transformers.PreTrainedConfig._attn_implementation
        transformers.PreTrainedConfig._attn_implementation_internal
        transformers.PreTrainedConfig._experts_implementation
        transformers.PreTrainedConfig._experts_implementation_internal
        transformers.PreTrainedConfig.sub_configs
    """,
    "models/ragged_model.py": """
        transformers.PreTrainedModel._no_split_modules
        transformers.PreTrainedModel.set_attn_implementation(self, attn_implementation)
    """,
    "models/sliding_windows.py": """
        transformers.masking_utils.find_packed_sequence_indices(position_ids)
    """,
    "models/tensor_parallel.py": """
        transformers.PreTrainedModel.tp_plan
    """,
    "models/routing.py": """
        transformers.PreTrainedModel._can_record_outputs
        transformers.utils.output_capturing.OutputRecorder(target_class=_)
    """,
    "models/composite.py": """
        transformers.PreTrainedModel._from_config(config)
        transformers.PreTrainedModel.base_model_prefix
        transformers.PreTrainedModel._tied_weights_keys
        transformers.core_model_loading.revert_weight_conversion(model, state_dict)
    """,
    "models/expert_adapters.py": """
        transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate
    """,
    "models/loading.py": """
        transformers.core_model_loading.revert_weight_conversion(model, state_dict)
    """,
    "models/pretrained_weights.py": """
        transformers.PreTrainedModel.initialize_weights(self)
        transformers.conversion_mapping.get_model_conversion_mapping(model)
        transformers.core_model_loading.dot_natural_key(s)
        transformers.core_model_loading.rename_source_key(
            source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict
        )
        transformers.core_model_loading.WeightConverter.add_tensor(
            self, target_key, source_key, source_pattern, future
        )
        transformers.core_model_loading.WeightConverter.convert(self, layer_name, model=_, config=_)
        transformers.core_model_loading.WeightConverter.operations
        transformers.core_model_loading.WeightConverter.source_patterns
        transformers.core_model_loading.WeightConverter.target_patterns
        transformers.core_model_loading.MergeModulelist(dim=_)
        transformers.core_model_loading.Concatenate(dim=_)
    """,
}

CUDA = {
    "models/flash_attention.py": """
        flash_attn.cute.interface.flash_attn_varlen_func(q, k, v, cu_seqlens_q=_, cu_seqlens_k=_, max_seqlen_q=_)
        flash_attn.cute.interface.flash_attn_varlen_func(..., max_seqlen_k=_, softmax_scale=_, causal=_, window_size=_)
        flash_attn.cute.interface.flash_attn_varlen_func(..., learnable_sink=_, softcap=_, deterministic=_)
    """,
    "weight_sync/broadcast.py": """
        torch.distributed.ProcessGroupNCCL(store, rank, size, options)
        torch.distributed.ProcessGroupNCCL.Options()
        torch.distributed.ProcessGroupNCCL.Options._timeout
        torch.distributed.ProcessGroupNCCL.Options.config
        torch.distributed.ProcessGroupNCCL.NCCLConfig.blocking
        torch.distributed.ProcessGroupNCCL.broadcast(self, tensors, opts)
        torch.distributed.ProcessGroupNCCL.abort(self)
    """,
    "data/host_memory.py": """
        torch._C._cudart.cudaHostRegister
        torch._C._cudart.cudaHostUnregister
    """,
}
"""Names that only a CUDA build of torch or a package for GPUs has."""

_REQ = "sglang.srt.managers.schedule_batch.Req"
_BATCH_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
REPLACED = {
    "skyrl_train.engines.sglang.sampler._on_create_batch": f"{_BATCH_INFO}.adjusted_from_schedule_batch",
    "skyrl_train.engines.sglang.sampler._on_merge_batch": f"{_BATCH_INFO}.adjusted_merge_batch",
    "skyrl_train.engines.sglang.sampler._on_filter_batch": f"{_BATCH_INFO}.adjusted_filter_batch",
    "skyrl_train.engines.sglang.sampler._update_finish_state": f"{_REQ}.update_finish_state",
}
"""Third-party functions by the function of skyrl_train that replaces them."""
