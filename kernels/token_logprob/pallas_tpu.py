"""`token_logprob` as TPU kernels: placeholder, replaced in the next commit."""

def statistics(*args, interpret=False, **kwargs):
    raise NotImplementedError

def logits_gradient(*args, interpret=False, **kwargs):
    raise NotImplementedError
