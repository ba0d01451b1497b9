"""A store in a bucket, over boto3."""
