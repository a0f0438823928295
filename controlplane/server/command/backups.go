package command

import (
	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/recovery/backups"
)

// backupFlags adds the flags of scheduled backups. The returned function validates their values
// after the flags are parsed.
func backupFlags(c *cobra.Command, o *backups.Options) (check func() error) {
	locationFlags(c, o)
	f := c.Flags()
	f.StringVar(&o.Schedule, "backup-schedule", "",
		"schedule of this replica's backups: five cron fields, in local time or with TZ=Zone in front, or @daily "+
			"(default: no backups)")
	f.StringArrayVar(&o.Recipients.Keys, "backup-recipient", nil,
		"age recipient (age1...) with which scheduled backups are encrypted instead of the store's key (repeatable)")
	f.StringVar(&o.Recipients.File, "backup-recipients-file", "",
		"file of age recipients for scheduled backups, one per line; it is read before each backup")
	f.IntVar(&o.Keep, "backup-keep", 14, "how many scheduled backups are kept: of this replica in a directory, of the "+
		"whole cluster in a bucket; "+
		"the oldest are deleted after a successful backup")
	return func() error { return o.Check() } // called after the flags are parsed
}

// locationFlags adds the flags for the directory or bucket of scheduled backups.
func locationFlags(c *cobra.Command, o *backups.Options) {
	f := c.Flags()
	f.StringVar(&o.Folder, "backup-folder", "",
		"directory of scheduled backups on this machine; it is created if it does not exist")
	f.StringVar(&o.S3.URL, "backup-s3", "",
		"S3 bucket of scheduled backups instead of a directory, as s3://BUCKET/PREFIX; the leader writes if "+
			"several replicas use the bucket")
	f.StringVar(&o.S3.Endpoint, "backup-s3-endpoint", "https://s3.amazonaws.com", "URL of the S3 server of the backups")
	f.StringVar(&o.S3.Region, "backup-s3-region", "us-east-1", "region of the S3 bucket of the backups")
	f.BoolVar(&o.S3.PathStyle, "backup-s3-path-style", false,
		"put the name of the S3 bucket in the path of the URL, not in the host name")
	f.StringVar(&o.S3.Credentials, "backup-s3-credentials", "",
		"file with the access key for the S3 bucket of the backups, in the format of the AWS tools, mode 0600 "+
			"(default: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the environment)")
	f.StringVar(&o.S3.CA, "backup-s3-ca", "",
		"file with the CA certificates that are trusted for the S3 server of the backups (default: the system's)")
}
