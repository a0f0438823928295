package command

import (
	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/server/backups"
)

// backupFlags adds the backups that a replica makes by itself.
func backupFlags(c *cobra.Command, o *backups.Options) (check func() error) {
	placeFlags(c, o)
	f := c.Flags()
	f.StringVar(&o.Schedule, "backup-schedule", "", "when this replica writes a backup of the store: cron's five fields, local time or with TZ=Zone in front, or @daily (default: never)")
	f.StringArrayVar(&o.To.Keys, "backup-recipient", nil, "recipient of age, age1..., to whom these backups are sealed instead of under the store's key (repeatable)")
	f.StringVar(&o.To.File, "backup-recipients-file", "", "file of such recipients, one per line, read before each backup")
	f.IntVar(&o.Keep, "backup-keep", 14, "how many of this replica's backups stay there, in a bucket of the whole cluster's; the oldest go first, and only after a good one")
	return func() error { return o.Check() } // of what the flags are set to by then
}

// placeFlags adds where backups are that replicas make by themselves.
func placeFlags(c *cobra.Command, o *backups.Options) {
	f := c.Flags()
	f.StringVar(&o.Folder, "backup-folder", "", "folder of these backups on this machine, made when it is missing")
	f.StringVar(&o.S3.URL, "backup-s3", "", "bucket of these backups instead of a folder, s3://BUCKET/PREFIX; of replicas that name it the leader writes")
	f.StringVar(&o.S3.Endpoint, "backup-s3-endpoint", "https://s3.amazonaws.com", "its server")
	f.StringVar(&o.S3.Region, "backup-s3-region", "us-east-1", "its region")
	f.BoolVar(&o.S3.PathStyle, "backup-s3-path-style", false, "its name is in the path and not in the server's name")
	f.StringVar(&o.S3.Credentials, "backup-s3-credentials", "",
		"file with the key for it, in the form of the AWS tools, mode 0600 (default: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the environment)")
	f.StringVar(&o.S3.CA, "backup-s3-ca", "", "file of the authorities that its server's certificate may be of (default: the machine's)")
}
