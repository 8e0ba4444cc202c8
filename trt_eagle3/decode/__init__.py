"""Decoding: from requests to tokens.

One iteration, from the top:

    EngineCore._turn            takes new requests, and steps the scheduler
      Scheduler.step            admits, launches a prefill, then a step of all prefilled sequences
        Prefiller.launch        prompt rows through target and draft; first tokens are read later
        Stepper.step            collects the step in flight, or launches one
          Drafter.propose       a tree for each sequence
          TargetRunner.forward  one forward over all trees
          verify                accepted paths, on the device
          Drafter.extend        true features for accepted rows, and the next trees
      Delivery.deliver          tokens to answers

For readers of vLLM: a KV slot is a row of a sequence here, ``Sequence`` is ``SequenceState``,
``SchedulerOutput`` is ``Batch``, ``SamplerOutput`` is ``StepOutput``, async scheduling is
``run_ahead``, and a backend of the graphs is a ``Session`` of ``engine``.
"""
