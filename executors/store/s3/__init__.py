"""A store in a bucket. `store.py` has the class, and `errors.py` turns the errors of boto3 into ours."""
