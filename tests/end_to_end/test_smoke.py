import lorry
def test_smoke(service):
    tc = service.create_lora_training_client("Qwen/Qwen3-0.6B", rank=4)
    assert tc.get_info().lora_rank == 4
