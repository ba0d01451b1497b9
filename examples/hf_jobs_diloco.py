"""Train one model with DiLoCo on Hugging Face Jobs. The jobs communicate through a bucket only.

    pip install 'serverless-replicas[diloco,hf,s3]' && hf auth login
    python examples/hf_jobs_diloco.py --n 4 --gpu H200 --rendezvous s3://BUCKET/runs

You can also use a bucket on Hugging Face: --rendezvous 's3://BUCKET/runs?endpoint_url=https://s3.hf.co/NAMESPACE'.
"""

from diloco_task import train_on

from executors import HFJobsExecutor

if __name__ == "__main__":
    train_on(HFJobsExecutor(labels={"project": "diloco"}), __doc__)
