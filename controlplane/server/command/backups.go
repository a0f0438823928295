package command

import (
	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/server/backups"
)

// backupFlags adds the backups that a replica makes by itself.
func backupFlags(c *cobra.Command, o *backups.Options) (check func() error) {
	f := c.Flags()
	f.StringVar(&o.Schedule, "backup-schedule", "", "when this replica writes a backup of the store: cron's five fields, local time or with TZ=Zone in front, or @daily (default: never)")
	f.StringVar(&o.Folder, "backup-folder", "", "folder of these backups on this machine, made when it is missing")
	f.IntVar(&o.Keep, "backup-keep", 14, "how many of this replica's backups stay there; the oldest go first, and only after a good one")
	return o.Check
}
