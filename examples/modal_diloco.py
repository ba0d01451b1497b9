"""Train one model with DiLoCo on Modal sandboxes. The sandboxes communicate through a bucket only.

pip install 'serverless-replicas[diloco,modal,s3]' && modal token new
python examples/modal_diloco.py --n 4 --gpu H100 --rendezvous s3://BUCKET/runs
"""

from diloco_task import train_on

from executors import ModalExecutor

if __name__ == "__main__":
    train_on(ModalExecutor(app_name="diloco"), __doc__)
