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
	"keelson.dev/keelson/raftstore/disk"
)

// backupCommand holds what is done with backups that are there. None of it needs a daemon, or changes a backup.
func backupCommand(version string) *cobra.Command {
	c := &cobra.Command{
		Use:   "backup",
		Short: "List, inspect, fetch and serve backups",
		Long: "List, inspect, fetch and serve backups. Without FILE, the newest backup of this cluster is used. It\n" +
			"is read from the directory or bucket to which replicas write their backups. That place is set by\n" +
			"flags, by the environment or by the configuration file.",
		Example: "  keelson-controlplane backup list\n  keelson-controlplane backup inspect /backups/today\n  keelson-controlplane backup serve",
	}
	c.AddCommand(backupInspectCommand(), backupListCommand(), backupFetchCommand(), backupServeCommand(version))
	return c
}

// opener are the flags that say what opens a backup.
type opener struct {
	store   datadir.StoreOptions
	dataDir string
}

func (o *opener) flags(c *cobra.Command) {
	c.Flags().StringVar(&o.store.Keys, "encryption-keys", "",
		"key file for an encrypted backup (default: pki/store.keys of the data directory, if it exists)")
	identityFlag(c, &o.store.Identity)
	c.Flags().StringVar(&o.dataDir, "data-dir", defaultDataDir, "data directory of this machine's replica")
}

func identityFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "identity", "", "file with an age identity (mode 0600), for a backup that is encrypted with age")
}

// ready takes the keys of this machine's replica where no others are named.
func (o *opener) ready() datadir.StoreOptions {
	if own := datadir.KeyFile(o.dataDir); o.store.Keys == "" {
		if _, err := os.Stat(own); err == nil {
			o.store.Keys = own
		}
	}
	return o.store
}

// opens adds to the error of a backup whose key is not there what to do.
func opens(err error) error {
	if errors.Is(err, disk.ErrSealed) {
		return fmt.Errorf("%w: --encryption-keys names the key file of that time", err)
	}
	return err
}

// newest says of which cluster the newest backup is taken, and where it is.
type newest struct {
	place   backups.Options
	cluster string
}

func (n *newest) flags(c *cobra.Command) {
	placeFlags(c, &n.place)
	c.Flags().StringVar(&n.cluster, "backup-cluster", "",
		"ID of the cluster whose newest backup is used, if there are backups of several clusters (default: the "+
			"cluster of the data directory)")
}

// find looks for it. What the time in a name makes unlikely is told, since it counts as the oldest.
func (n *newest) find(ctx context.Context, dataDir string, note io.Writer) (backups.Found, error) {
	all, err := backups.Look(ctx, n.place)
	if err != nil {
		return backups.Found{}, err
	}
	tellAhead(note, all)
	return backups.Newest(all, cmp.Or(n.cluster, datadir.ClusterID(dataDir)))
}

// tellAhead names the backups whose time is still to come.
func tellAhead(w io.Writer, all []backups.Found) {
	for _, b := range all {
		if b.Ahead {
			fmt.Fprintf(w, "%s: its time is still to come, so a clock was wrong: it counts as the oldest\n", b.Name)
		}
	}
}

// chosen is the backup that a verb is about, on this machine's disk. done removes what was fetched for it.
func (n *newest) chosen(ctx context.Context, args []string, dataDir, workDir string, note io.Writer) (path string, done func() error, err error) {
	if len(args) > 0 {
		return args[0], func() error { return nil }, nil
	}
	found, err := n.find(ctx, dataDir, note)
	if err != nil {
		return "", nil, err
	}
	if n.place.S3.URL == "" {
		return found.Name, func() error { return nil }, nil
	}
	if _, err := recovery.SweepServed(workDir, ""); err != nil {
		return "", nil, fmt.Errorf("--work-dir: %w", err)
	}
	f, err := recovery.FetchedFile(workDir)
	if err != nil {
		return "", nil, err
	}
	done = func() error { return errors.Join(os.Remove(f.Name()), f.Close()) }
	if err := backups.Fetch(ctx, n.place, found, diskheadroom.Target{Dir: workDir, ProtectedPath: dataDir}, f); err != nil {
		return "", nil, errors.Join(err, done())
	}
	return f.Name(), done, nil
}

// workDirFlag says where large files are for a while. /tmp is in memory on many machines.
func workDirFlag(c *cobra.Command) *string {
	return c.Flags().String("work-dir", "/var/tmp", "directory to which the backup is unpacked; its copy is removed when the command exits")
}

func backupInspectCommand() *cobra.Command {
	var o opener
	var n newest
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
		path, done, err := n.chosen(c.Context(), args, o.dataDir, *workDir, c.ErrOrStderr())
		if err != nil {
			return err
		}
		b, err := recovery.InspectBackup(o.ready(), path)
		err = errors.Join(opens(err), done())
		if b.Cluster == "" && !b.Sealed {
			return err
		}
		if output == "json" {
			return errors.Join(json.NewEncoder(c.OutOrStdout()).Encode(b), err)
		}
		return errors.Join(printBackup(c.OutOrStdout(), path, b), err)
	}
	o.flags(c)
	n.flags(c)
	c.Flags().StringVarP(&output, "output", "o", "text", "output format: text or json")
	return c
}

// printBackup writes what is in a backup for a person.
func printBackup(w io.Writer, path string, b api.ClusterBackup) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, name+"\t"+format+"\n", args...) }
	row("file", "%s", path)
	if b.Cluster != "" {
		row("cluster", "%s", b.Cluster)
		row("made", "%s", time.UnixMilli(b.Created).UTC().Format(time.RFC3339))
		row("revision", "%d", b.Revision)
		row("holds", "%d keys, %s", b.Keys, size(b.Bytes))
		row("format", "%d", b.Format)
	}
	switch {
	case len(b.Recipients) > 0:
		row("sealed", "by age, to %s", &backups.Sealed{Recipients: b.Recipients})
	case b.Sealed:
		row("sealed", "under key %s of the store's key file", b.KeyID)
	default:
		row("sealed", "no: it is in clear")
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
			fmt.Fprintf(t, "%s\t%d\t%s\n", resourceOf(k), k.Objects, size(k.Bytes))
		}
	}
	return t.Flush()
}

// resourceOf is what a person calls the kind: pods, deployments.apps, or where its records lie.
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
		Short:   "List the backups in the directory or bucket, newest first",
		Example: "  keelson-controlplane backup list\n  keelson-controlplane backup list --backup-folder /backups",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			all, err := backups.Look(c.Context(), place)
			if err != nil {
				return err
			}
			tellAhead(c.ErrOrStderr(), all)
			t := tabwriter.NewWriter(c.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(t, "MADE\tSIZE\tNAME")
			for _, b := range all {
				fmt.Fprintf(t, "%s\t%s\t%s\n", b.Of.UTC().Format(time.RFC3339), size(b.Size), b.Name)
			}
			return t.Flush()
		},
	}
	placeFlags(c, &place)
	return c
}

func backupFetchCommand() *cobra.Command {
	var n newest
	name, dataDir := "", ""
	c := &cobra.Command{
		Use:     "fetch FILE",
		Short:   "Copy a backup from the directory or bucket to a file; the newest without --backup",
		Example: "  keelson-controlplane backup fetch /root/newest\n  keelson-controlplane backup fetch /root/b --backup prod/ID_cp1_20260401T020000Z.backup",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if name == "" {
				b, err := n.find(c.Context(), dataDir, c.ErrOrStderr())
				if err != nil {
					return err
				}
				return fetch(c, n.place, b, dataDir, args[0])
			}
			all, err := backups.Look(c.Context(), n.place)
			if err != nil {
				return err
			}
			for _, b := range all {
				if name == b.Name || name == filepath.Base(b.Name) {
					return fetch(c, n.place, b, dataDir, args[0])
				}
			}
			return fmt.Errorf("--backup %q: 'keelson-controlplane backup list' shows which there are: %w", name, backups.ErrNone)
		},
	}
	n.flags(c)
	c.Flags().StringVar(&name, "backup", "", "name of the backup to copy, as printed by 'backup list' (default: the newest)")
	c.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "data directory of this machine's replica")
	return c
}

// fetch brings a backup to a file that is not there yet. What is not whole goes again.
func fetch(c *cobra.Command, place backups.Options, b backups.Found, dataDir, path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = backups.Fetch(c.Context(), place, b, diskheadroom.Target{Dir: filepath.Dir(path), ProtectedPath: dataDir}, f)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	fmt.Fprintf(c.OutOrStdout(), "%s: %s, %s\n", path, b.Name, size(b.Size))
	return nil
}

func backupServeCommand(version string) *cobra.Command {
	var o opener
	var n newest
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
		path, done, err := n.chosen(ctx, args, o.dataDir, *workDir, c.ErrOrStderr())
		if err != nil {
			return err
		}
		level := slog.LevelError
		if debug {
			level = slog.LevelDebug
		}
		options := recovery.ServeOptions{Path: path, WorkDir: *workDir, DataDir: o.dataDir, Store: o.ready(), Version: version,
			Log: slog.New(slog.NewTextHandler(c.ErrOrStderr(), &slog.HandlerOptions{Level: level}))}
		err = server.ServeBackup(ctx, options, func(s recovery.Served) error { return tellServed(c.OutOrStdout(), output, path, s) })
		if errors.Is(err, context.Canceled) && ctx.Err() != nil {
			err = nil
		}
		return errors.Join(opens(err), done())
	}
	o.flags(c)
	n.flags(c)
	c.Flags().StringVarP(&output, "output", "o", "text", "output format: text or json")
	c.Flags().BoolVar(&stdin, "until-stdin-ends", false, "also exit when standard input ends")
	c.Flags().BoolVar(&debug, "debug", false, "log debug messages")
	return c
}

func tellServed(w io.Writer, output, path string, s recovery.Served) error {
	if output == "json" {
		return json.NewEncoder(w).Encode(s)
	}
	_, err := fmt.Fprintf(w, "%s: cluster %s at revision %d of %s is served at %s. In another terminal:\n\n"+
		"  export KUBECONFIG=%s\n  kubectl get namespaces\n\nCtrl-C ends it and removes %s.\n",
		path, s.Backup.Cluster, s.Backup.Revision, time.UnixMilli(s.Backup.Created).UTC().Format(time.RFC3339), s.API, s.Kubeconfig, s.Folder)
	return err
}
