package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/internal/diskheadroom"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk"
)

// backupCommand returns the command 'backup' with its subcommands, which read existing backups.
// They need no running replica and change no backup.
func backupCommand(version string) *cobra.Command {
	c := &cobra.Command{
		Use:   "backup",
		Short: "List, inspect, fetch and serve backups",
		Long: "List, inspect, fetch and serve backups. Without FILE, the newest backup of this cluster is used. It\n" +
			"is read from the directory or bucket to which replicas write their backups. That place is set by\n" +
			"flags, by the environment or by the configuration file.",
		Example: "  keelson-controlplane backup list\n  keelson-controlplane backup inspect /backups/today\n  " +
			"keelson-controlplane backup serve",
	}
	c.AddCommand(backupInspectCommand(), backupListCommand(), backupFetchCommand(), backupServeCommand(version))
	return c
}

// backupKeys contains the values of the flags that name files with keys. The keys decrypt a backup.
type backupKeys struct {
	store   datadir.StoreOptions
	dataDir string
}

func (o *backupKeys) addFlags(c *cobra.Command) {
	c.Flags().StringVar(&o.store.Keys, "encryption-keys", "",
		"key file for an encrypted backup (default: pki/store.keys of the data directory, if it exists)")
	identityFlag(c, &o.store.Identity)
	c.Flags().StringVar(&o.dataDir, "data-dir", defaultDataDir, "data directory of this machine's replica")
}

func identityFlag(c *cobra.Command, path *string) {
	c.Flags().StringVar(path, "identity", "",
		"file with an age identity (mode 0600), for a backup that is encrypted with age")
}

// storeOptions returns the store options for decrypting a backup. If no key file is configured,
// they name the key file of this machine's replica, if it exists.
func (o *backupKeys) storeOptions() datadir.StoreOptions {
	if own := datadir.KeyFile(o.dataDir); o.store.Keys == "" {
		if _, err := os.Stat(own); err == nil {
			o.store.Keys = own
		}
	}
	return o.store
}

// explainSealed adds a hint to err, if it means that a backup is encrypted and its key is missing
// (disk.ErrSealed): --encryption-keys must name the key file. It returns other errors unchanged.
func explainSealed(err error) error {
	if errors.Is(err, disk.ErrSealed) {
		return fmt.Errorf("%w: --encryption-keys must name the key file of the backup", err)
	}
	return err
}

// backupSelector contains the values of the flags that say where to look for the newest backup, and
// of which cluster.
type backupSelector struct {
	location backups.Options
	cluster  string
}

func (n *backupSelector) addFlags(c *cobra.Command) {
	locationFlags(c, &n.location)
	c.Flags().StringVar(&n.cluster, "backup-cluster", "",
		"ID of the cluster whose newest backup is used, if there are backups of several clusters (default: the "+
			"cluster of the data directory)")
}

// newestBackup returns the newest backup of the cluster. A backup with a time in the future is
// considered the oldest, and a message about it is written to warnings.
func (n *backupSelector) newestBackup(ctx context.Context, dataDir string, warnings io.Writer) (
	backups.FoundBackup, error,
) {
	all, err := backups.ListBackups(ctx, n.location)
	if err != nil {
		return backups.FoundBackup{}, err
	}
	printFutureBackups(warnings, all)
	return backups.Newest(all, cmp.Or(n.cluster, datadir.ClusterID(dataDir)))
}

// printFutureBackups writes a message to w for each backup with a time in the future.
func printFutureBackups(w io.Writer, all []backups.FoundBackup) {
	for _, b := range all {
		if b.InFuture {
			fmt.Fprintf(w, "%s: its time is in the future, because a clock was wrong: it counts as the oldest\n",
				b.Name)
		}
	}
}

// selectBackup returns the path of the backup that a command works on: the file in args, or the
// newest backup. A backup in a bucket is first copied to workDir; the function done removes that
// copy.
func (n *backupSelector) selectBackup(ctx context.Context, args []string, dataDir, workDir string, warnings io.Writer) (
	path string, done func() error, err error,
) {
	if len(args) > 0 {
		return args[0], func() error { return nil }, nil
	}
	found, err := n.newestBackup(ctx, dataDir, warnings)
	if err != nil {
		return "", nil, err
	}
	if n.location.S3.URL == "" {
		return found.Name, func() error { return nil }, nil
	}
	if _, err := recovery.RemoveLeftovers(workDir, ""); err != nil {
		return "", nil, fmt.Errorf("--work-dir: %w", err)
	}
	f, err := recovery.CreateFetchedFile(workDir)
	if err != nil {
		return "", nil, err
	}
	done = func() error { return errors.Join(os.Remove(f.Name()), f.Close()) }
	if err := backups.Fetch(ctx, n.location, found, diskheadroom.Target{Dir: workDir, ProtectedPath: dataDir},
		f); err !=
		nil {
		return "", nil, errors.Join(err, done())
	}
	return f.Name(), done, nil
}

// workDirFlag adds the flag for the directory of large temporary files. The default is not /tmp,
// which is in memory on many machines.
func workDirFlag(c *cobra.Command) *string {
	return c.Flags().String("work-dir", "/var/tmp",
		"directory to which the backup is unpacked; its copy is removed when the command exits")
}

func backupInspectCommand() *cobra.Command {
	var o backupKeys
	var n backupSelector
	output := ""
	c := &cobra.Command{
		Use:   "inspect [FILE]",
		Short: "Inspect a backup: its cluster, its revision and the number of objects of each kind",
		Long: "Inspect a backup: show its cluster, its time, its revision, the key that it requires, and the\n" +
			"number of objects of each kind. The whole file is read and verified. Nothing is changed.\n" +
			"\n" +
			"If the key of an encrypted backup is not available, only the header of the backup is shown and the\n" +
			"exit code is not 0.",
		Example: "  keelson-controlplane backup inspect /backups/today\n  keelson-controlplane backup inspect -o json",
		Args:    cobra.MaximumNArgs(1),
	}
	workDir := workDirFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		path, done, err := n.selectBackup(c.Context(), args, o.dataDir, *workDir, c.ErrOrStderr())
		if err != nil {
			return err
		}
		b, err := recovery.InspectBackup(o.storeOptions(), path)
		err = errors.Join(explainSealed(err), done())
		if b.Cluster == "" && !b.Sealed {
			return err
		}
		if output == "json" {
			return errors.Join(json.NewEncoder(c.OutOrStdout()).Encode(b), err)
		}
		return errors.Join(printBackup(c.OutOrStdout(), path, b), err)
	}
	o.addFlags(c)
	n.addFlags(c)
	c.Flags().StringVarP(&output, "output", "o", "text", "output format: text or json")
	return c
}

// printBackup writes a description of a backup as text.
func printBackup(w io.Writer, path string, b api.ClusterBackup) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, name+"\t"+format+"\n", args...) }
	row("file", "%s", path)
	if b.Cluster != "" {
		row("cluster", "%s", b.Cluster)
		row("made", "%s", time.UnixMilli(b.Created).UTC().Format(time.RFC3339))
		row("revision", "%d", b.Revision)
		row("holds", "%d keys, %s", b.Keys, formatSize(b.Bytes))
		row("format", "%d", b.Format)
	}
	switch {
	case len(b.Recipients) > 0:
		row("sealed", "by age, to %s", &backups.AgeHeader{Recipients: b.Recipients})
	case b.Sealed:
		row("sealed", "under key %s of the store's key file", b.KeyID)
	default:
		row("sealed", "no: it is not encrypted")
	}
	if b.Kinds != nil {
		row("level", "%d", b.FeatureLevel)
	}
	if err := t.Flush(); err != nil || len(b.Kinds) == 0 {
		return err
	}
	fmt.Fprintln(w)
	t = tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "RESOURCE\tOBJECTS\tSIZE")
	for _, k := range b.Kinds {
		if k.Objects > 0 {
			fmt.Fprintf(t, "%s\t%d\t%s\n", resourceOf(k), k.Objects, formatSize(k.Bytes))
		}
	}
	return t.Flush()
}

// resourceOf returns the name of a resource, such as pods or deployments.apps. For records that
// belong to no resource, it returns their key prefix.
func resourceOf(k api.ClusterBackupKind) string {
	switch {
	case k.Resource == "":
		return k.Place
	case k.Group == "":
		return k.Resource
	}
	return k.Resource + "." + k.Group
}

func backupListCommand() *cobra.Command {
	var place backups.Options
	c := &cobra.Command{
		Use:     "list",
		Short:   "List the scheduled backups in their directory or bucket, newest first",
		Example: "  keelson-controlplane backup list\n  keelson-controlplane backup list --backup-folder /backups",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			all, err := backups.ListBackups(c.Context(), place)
			if err != nil {
				return err
			}
			printFutureBackups(c.ErrOrStderr(), all)
			t := tabwriter.NewWriter(c.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(t, "MADE\tSIZE\tNAME")
			for _, b := range all {
				fmt.Fprintf(t, "%s\t%s\t%s\n", b.MadeAt.UTC().Format(time.RFC3339), formatSize(b.Size), b.Name)
			}
			return t.Flush()
		},
	}
	locationFlags(c, &place)
	return c
}

func backupFetchCommand() *cobra.Command {
	var n backupSelector
	name, dataDir := "", ""
	c := &cobra.Command{
		Use:   "fetch FILE",
		Short: "Copy a scheduled backup (default: the newest) from its directory or bucket to FILE",
		Example: "  keelson-controlplane backup fetch /root/newest\n  keelson-controlplane backup fetch /root/b " +
			"--backup prod/ID_cp1_20260401T020000Z.backup",
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if name == "" {
				b, err := n.newestBackup(c.Context(), dataDir, c.ErrOrStderr())
				if err != nil {
					return err
				}
				return fetchBackup(c, n.location, b, dataDir, args[0])
			}
			all, err := backups.ListBackups(c.Context(), n.location)
			if err != nil {
				return err
			}
			for _, b := range all {
				if name == b.Name || name == filepath.Base(b.Name) {
					return fetchBackup(c, n.location, b, dataDir, args[0])
				}
			}
			return fmt.Errorf("--backup %q: 'keelson-controlplane backup list' lists the backups: %w", name,
				backups.ErrNone)
		},
	}
	n.addFlags(c)
	c.Flags().StringVar(&name, "backup", "",
		"name of the backup to copy, as printed by 'backup list' (default: the newest)")
	c.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "data directory of this machine's replica")
	return c
}

// fetchBackup copies the backup b from its directory or bucket to the new file path, which must not
// exist. If that fails, it removes the incomplete file.
func fetchBackup(c *cobra.Command, location backups.Options, b backups.FoundBackup, dataDir, path string) error {
	f, err := durable.Create(path, durable.Options{Level: durable.Intact, Exclusive: true})
	if err != nil {
		return err
	}
	err = backups.Fetch(c.Context(), location, b,
		diskheadroom.Target{Dir: filepath.Dir(path), ProtectedPath: dataDir}, f)
	if err != nil {
		return errors.Join(err, f.Discard())
	}
	if err := f.Commit(); err != nil {
		return err
	}
	fmt.Fprintf(c.OutOrStdout(), "%s: %s, %s\n", path, b.Name, formatSize(b.Size))
	return nil
}

func backupServeCommand(version string) *cobra.Command {
	var o backupKeys
	var n backupSelector
	output, stdin, debug := "", false, false
	c := &cobra.Command{
		Use:   "serve [FILE]",
		Short: "Serve the API of a backup on this machine's loopback address until interrupted",
		Long: "Restore a backup into a temporary directory, and serve its API on 127.0.0.1 until interrupted.\n" +
			"Use it, for example, to read a deleted object with kubectl. 'kctl cluster restore-test' compares a\n" +
			"backup with the cluster.\n" +
			"\n" +
			"The temporary replica has new keys, runs no controllers, and accepts no nodes. The cluster is not\n" +
			"changed. Writes to the temporary replica are lost when it exits, because its directory is removed.\n" +
			"If the command is killed, the next call removes the directory.",
		Example: "  keelson-controlplane backup serve /backups/today\n  keelson-controlplane backup serve",
		Args:    cobra.MaximumNArgs(1),
	}
	workDir := workDirFlag(c)
	c.RunE = func(c *cobra.Command, args []string) error {
		ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
		defer stop()
		if stdin {
			go func() { _, _ = io.Copy(io.Discard, c.InOrStdin()); stop() }()
		}
		path, done, err := n.selectBackup(ctx, args, o.dataDir, *workDir, c.ErrOrStderr())
		if err != nil {
			return err
		}
		level := slog.LevelError
		if debug {
			level = slog.LevelDebug
		}
		options := recovery.ServeOptions{Path: path, WorkDir: *workDir, DataDir: o.dataDir, Store: o.storeOptions(),
			Version: version,
			Log:     slog.New(slog.NewTextHandler(c.ErrOrStderr(), &slog.HandlerOptions{Level: level}))}
		err = server.ServeBackup(ctx, options, func(s recovery.ServedBackup) error {
			return printServed(c.OutOrStdout(), output, path, s)
		})
		if errors.Is(err, context.Canceled) && ctx.Err() != nil {
			err = nil
		}
		return errors.Join(explainSealed(err), done())
	}
	o.addFlags(c)
	n.addFlags(c)
	c.Flags().StringVarP(&output, "output", "o", "text", "output format: text or json")
	c.Flags().BoolVar(&stdin, "until-stdin-ends", false, "also exit when standard input ends")
	c.Flags().BoolVar(&debug, "debug", false, "log debug messages")
	return c
}

func printServed(w io.Writer, output, path string, s recovery.ServedBackup) error {
	if output == "json" {
		return json.NewEncoder(w).Encode(s)
	}
	_, err := fmt.Fprintf(w, "%s: cluster %s at revision %d of %s is served at %s. In another terminal:\n\n"+
		"  export KUBECONFIG=%s\n  kubectl get namespaces\n\nCtrl-C stops it and removes %s.\n",
		path, s.Backup.Cluster, s.Backup.Revision, time.UnixMilli(s.Backup.Created).UTC().Format(time.RFC3339), s.API,
		s.Kubeconfig, s.Folder)
	return err
}
