#!/usr/bin/env bash
# deploy/aws_iam.sh BUCKET: the roles that the variant #s3 of cluster.yaml names, by AWS's own command (`aws`), with the
# rights of whoever calls it. Workers may use the bucket; the head too, and may start and end machines of this cluster.
#
# May be called again, with another bucket too.
set -euo pipefail
cd "$(dirname "$0")/.."
bucket=${1-}
if [[ ! $bucket =~ ^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$ ]]; then
    echo "usage: deploy/aws_iam.sh BUCKET, the bucket's name without s3://, not '$bucket'" >&2
    exit 2
fi
cluster=$(sed -n 's/^cluster_name: //p' cluster.yaml)
{ read -r head && read -r worker; } < <(sed -n 's/.* IamInstanceProfile: {Name: \(.*\)}$/\1/p' cluster.yaml)
account=$(aws sts get-caller-identity --query Account --output text)

# A role, and the instance profile of the same name by which machines get it.
role() {
    aws iam get-role --role-name "$1" >/dev/null 2>&1 || aws iam create-role --role-name "$1" \
        --assume-role-policy-document '{"Version": "2012-10-17", "Statement": [
            {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}' >/dev/null
    aws iam get-instance-profile --instance-profile-name "$1" >/dev/null 2>&1 ||
        aws iam create-instance-profile --instance-profile-name "$1" >/dev/null
    if [[ $(aws iam get-instance-profile --instance-profile-name "$1" \
        --query 'InstanceProfile.Roles[].RoleName' --output text) != "$1" ]]; then
        aws iam add-role-to-instance-profile --instance-profile-name "$1" --role-name "$1"
    fi
    aws iam put-role-policy --role-name "$1" --policy-name bucket --policy-document '{"Version": "2012-10-17", "Statement": [
        {"Effect": "Allow", "Resource": "arn:aws:s3:::'"$bucket"'",
         "Action": ["s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"]},
        {"Effect": "Allow", "Resource": "arn:aws:s3:::'"$bucket"'/*",
         "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload",
                    "s3:ListMultipartUploadParts"]}]}'
}

role "$worker"
role "$head"
# What Ray's autoscaler calls. By their tag it may end only the machines that Ray started as this cluster's.
aws iam put-role-policy --role-name "$head" --policy-name machines --policy-document '{"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Resource": "*", "Action": ["ec2:DescribeInstances", "ec2:RunInstances"]},
    {"Effect": "Allow", "Resource": "*", "Action": "ec2:CreateTags",
     "Condition": {"StringEquals": {"ec2:CreateAction": "RunInstances"}}},
    {"Effect": "Allow", "Resource": "*", "Action": ["ec2:CreateTags", "ec2:TerminateInstances"],
     "Condition": {"StringEquals": {"aws:ResourceTag/ray-cluster-name": "'"$cluster"'"}}},
    {"Effect": "Allow", "Resource": "arn:aws:iam::'"$account"':role/'"$worker"'", "Action": "iam:PassRole",
     "Condition": {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}}]}'
echo "made the roles and instance profiles $head and $worker; now: sed -i 's/^#s3 //' cluster.yaml"
