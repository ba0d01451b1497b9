"""Train one model on this machine and on Modal at the same time. The replicas communicate through a bucket only.

pip install 'serverless-replicas[diloco,modal,s3]' && modal token new
python examples/several_backends.py --rendezvous s3://BUCKET/runs

While the run continues, add replicas from here, or from any machine that has the task's digest:
replicas add RUN --n 4 --backend slurm
"""

from diloco_task import train_on

if __name__ == "__main__":
    train_on("local:1,modal:1", __doc__, n=2)
