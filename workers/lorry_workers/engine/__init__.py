"""Everything that touches torch on a worker. Start with `engine`; nothing here knows of Redis or Celery.

    engine          the door: jobs, training ops, checkpoints, sampling
    adapter         A and B matrices: peft decides and names, Lorry holds them flat
    bank            the adapters of one pass, laid out for it, and their gradients until it has succeeded
    lora_linear     the base product plus the active adapters' low-rank products
    attention       attention over packed rows
    head            log-probabilities and their gradients, chunk by chunk
    losses          one function per loss
    batch           the data of many jobs to packed micro-batches and back
    trainer         forward and forward_backward of many jobs
    optimizer       AdamW
    job_state       what a job is
    training_state  a job as the content of a checkpoint, and back
    checkpoints     the same on a disk
    sampler         tokens out of the model
    stopping        where a sampled sequence ends

One thread calls all of it.
"""
