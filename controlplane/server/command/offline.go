package command

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/raftstore/disk"
)

// addOfflineFlags adds the flags of commands that work on the data directory of a stopped replica.
func addOfflineFlags(c *cobra.Command, cfg *server.Config) {
	addIdentityFlags(c, cfg)
	describeAddressDefault(c)
	diskFlags(c, &cfg.Store)
}

func restoreCommand() *cobra.Command {
	var cfg server.Config
	var o recovery.RestoreOptions
	c := &cobra.Command{
		Use:   "restore FILE",
		Short: "Restore the store of this replica from a backup",
		Long: "Restore the store from a backup, and make this replica the first member of a new raft cluster.\n" +
			"\n" +
			"Stop the daemons of all replicas first. The command is refused while another replica is reachable.\n" +
			"The whole backup is verified before anything is changed. The cluster's keys are read from the data\n" +
			"directory of this replica. If they are lost, create new keys with 'init'; workers then need new\n" +
			"join tokens.\n" +
			"\n" +
			"Nodes that were revoked after the backup stay revoked, as far as the existing data shows. Join\n" +
			"tokens in the backup become invalid.",
		Example: "  keelson-controlplane restore /backups/today --replace\n" +
			"\n" +
			"  # Restore a backup after the loss of all keys\n" +
			"  keelson-controlplane init --advertise-address 192.0.2.11\n" +
			"  keelson-controlplane restore /backups/today --any-cluster",
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := recovery.Restore(cfg.Dir(), args[0], o)
			if err != nil {
				return err
			}
			w := c.OutOrStdout()
			fmt.Fprintf(w, "restored %s\n", describeBackup(r.Backup))
			if r.MovedTo != "" {
				fmt.Fprintf(w, "the previous data is in %s\n", r.MovedTo)
			}
			printKeptChanges(w, r)
			fmt.Fprintf(w, "Start this replica with 'keelson-controlplane run'. Every other replica starts again "+
				"empty: stop it, run\n"+
				"'keelson-controlplane rebuild --server %s' there, then 'run'.\n", r.Address)
			printReset(w, r.Abandoned, r.Address)
			return nil
		},
	}
	addOfflineFlags(c, &cfg)
	c.Flags().BoolVar(&o.AnyCluster, "any-cluster", false, "allow a backup of another cluster")
	c.Flags().StringVar(&o.BackupKeys, "backup-keys", "",
		"key file of the backup, if it was encrypted by another cluster or with a key that is no longer in use")
	identityFlag(c, &o.Identity)
	c.Flags().BoolVar(&o.LeaveOthers, "leave-others-behind", false,
		"restore although other replicas are reachable; they continue as a second cluster with the same keys")
	c.Flags().BoolVar(&o.Replace, "replace", false, "move existing data of this replica aside")
	return c
}

// printKeptChanges lists the changes that a restore has made to the state in the backup:
// revocations, joined nodes, and the number of deleted join tokens. If the previous data of the
// replica could not be read, it also prints a warning.
func printKeptChanges(w io.Writer, r recovery.RestoreReport) {
	if len(r.Revoked) > 0 {
		fmt.Fprintf(w, "nodes that were revoked after the backup stay revoked: %s\n", strings.Join(r.Revoked, ", "))
	}
	if len(r.Joined) > 0 {
		fmt.Fprintf(w, "nodes that joined after the backup are kept, and volumes for one node wait until these "+
			"nodes report: %s\n"+
			"for a machine that no longer exists: 'kubectl delete node NAME'\n", strings.Join(r.Joined, ", "))
	}
	if r.Unread != nil {
		fmt.Fprintf(w, "it is not certain which nodes were revoked or deleted after the backup (%v):\n"+
			"unless the cluster's CA is newer than the backup, their certificates are valid again; 'kctl cluster "+
			"revoke node/NAME' revokes them.\n"+
			"It is also unknown which nodes joined: volumes for one node wait a minute for them. Check that the "+
			"agents of such machines run, or that the machines are off\n", r.Unread)
	}
	if r.Tokens > 0 {
		fmt.Fprintf(w, "join tokens of the backup are invalid (%d): 'kctl cluster token create' creates new ones\n",
			r.Tokens)
	}
}

func describeBackup(i disk.BackupInfo) string {
	text := fmt.Sprintf("cluster %s at revision %d of %s, %d keys, %s, format %d",
		i.Cluster, i.Revision, i.Created.UTC().Format(time.RFC3339), i.Keys, formatSize(i.Bytes), i.Format)
	if i.Sealed {
		text += ", encrypted under key " + i.KeyID
	}
	return text
}

// formatSize formats a number of bytes with a binary unit.
func formatSize(n int64) string {
	if n < 1<<20 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

func verifyCommand() *cobra.Command {
	var o datadir.StoreOptions
	dataDir := ""
	c := &cobra.Command{
		Use:   "verify FILE",
		Short: "Verify that a backup is complete, and show a summary",
		Example: "  keelson-controlplane verify /backups/today\n  keelson-controlplane verify /backups/today " +
			"--encryption-keys /etc/keelson/keys",
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if own := datadir.KeyFile(dataDir); o.Keys == "" {
				if _, err := os.Stat(own); err == nil {
					o.Keys = own
				}
			}
			info, err := recovery.Verify(o, args[0])
			if err != nil {
				return err
			}
			fmt.Fprintf(c.OutOrStdout(), "%s: complete, %s\n", args[0], describeBackup(info))
			return nil
		},
	}
	c.Flags().StringVar(&o.Keys, "encryption-keys", "",
		"key file for an encrypted backup (default: pki/store.keys of the data directory, if it exists)")
	identityFlag(c, &o.Identity)
	c.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "data directory of this machine's replica")
	return c
}

// printRecovery lists the data and the members that a recovery keeps, and those that it loses.
func printRecovery(w io.Writer, lost recovery.RecoveryReport) {
	index, term := recovery.LastEntry(lost.Disk)
	fmt.Fprintf(w, "this replica has everything up to entry %d of term %d; what was acknowledged beyond it is lost\n",
		index, term)
	if all := lost.Disk.Snapshots; len(all) > 0 && all[0].Revision > 0 {
		fmt.Fprintf(w, "its newest snapshot is of revision %d, %s; the log continues from there\n", all[0].Revision,
			all[0].Taken.UTC().Format(time.RFC3339))
	}
	if len(lost.Members) > 0 {
		fmt.Fprintf(w, "no longer members: %s\n", strings.Join(lost.Members, ", "))
		fmt.Fprintf(w, "their machines must be reset before they boot again: %s\n", formatMachines(lost.Addresses))
	}
	if len(lost.Reachable) > 0 {
		fmt.Fprintf(w, "of them %s still respond: stop them, compare the output of 'inspect' on each, and "+
			"recover the replica with the most entries\n", strings.Join(lost.Reachable, ", "))
	}
}

// formatMachines returns one text with the names of replicas and the hosts on which they run.
// addresses maps the names to peer addresses.
func formatMachines(addresses map[string]string) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(addresses)) {
		host, _, err := net.SplitHostPort(addresses[name])
		if err != nil {
			host = addresses[name]
		}
		out = append(out, fmt.Sprintf("%s (%s)", name, host))
	}
	return strings.Join(out, ", ")
}

// printReset prints instructions to reset the machines of the other replicas before they boot,
// because these replicas still have old data. addresses maps the names of these replicas to their
// peer addresses. joinAddress is the address of the replica that they join.
func printReset(w io.Writer, addresses map[string]string, joinAddress string) {
	if len(addresses) == 0 {
		return
	}
	fmt.Fprintf(w, "RESET BEFORE THEY BOOT: %s. While they cannot reach this replica, they would serve their old data "+
		"beside it, and\n"+
		"clients other than agents and kctl cannot see the difference. On each of them, without its network or in its "+
		"rescue system:\n"+
		"  systemctl stop keelson-controlplane\n"+
		"  keelson-controlplane rebuild --server %s\n"+
		"then give it its network and 'systemctl start keelson-controlplane'. A machine that no longer exists "+
		"needs nothing.\n",
		formatMachines(addresses), joinAddress)
}

// canConfirm reports whether the user can be asked to confirm an operation. It returns false if
// input is a file but not a terminal.
func canConfirm(input io.Reader) bool {
	f, ok := input.(*os.File)
	if !ok {
		return true
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// confirmCluster asks the user to type the cluster's name, at most twice. It returns an error
// unless a line of input is the name.
func confirmCluster(input io.Reader, w io.Writer, cluster string) error {
	lines, typed := bufio.NewScanner(io.LimitReader(input, 4096)), ""
	for range 2 {
		fmt.Fprintf(w, "type the name of the cluster to continue with this replica alone (%s): ", cluster)
		if !lines.Scan() {
			break
		}
		if typed = strings.TrimSpace(lines.Text()); typed == cluster {
			return nil
		}
	}
	return fmt.Errorf("nothing was changed, because %q is not the name of the cluster: %w", typed, recovery.ErrUnsafe)
}

func recoverCommand() *cobra.Command {
	var cfg server.Config
	confirmed := false
	c := &cobra.Command{
		Use:   "recover",
		Short: "Recover a cluster that has lost its quorum, with this replica alone (unsafe)",
		Long: "Recover a cluster that has lost its quorum: make this replica the only member of the raft cluster,\n" +
			"with the data on its disk.\n" +
			"\n" +
			"WARNING: Writes that only the lost replicas had are lost, although they were acknowledged. Use this\n" +
			"command only if the disks of a majority are permanently lost and no recent backup is better.\n" +
			"\n" +
			"Run it on one replica only: the one whose last log entry has the highest term, and among these the\n" +
			"highest index. 'inspect' shows both. Never start the other replicas with their old data again.\n" +
			"\n" +
			"The command prints what it found, and asks for the name of the cluster. Without a terminal, it\n" +
			"requires --unsafe-lost-majority. It is refused while this replica and the reachable members are a\n" +
			"quorum.",
		Example: "  keelson-controlplane inspect\n  keelson-controlplane recover\n  keelson-controlplane recover " +
			"--unsafe-lost-majority",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			lost, err := recovery.Recover(cfg.Dir(), confirmed)
			w := c.OutOrStdout()
			if err == nil || errors.Is(err, recovery.ErrUnsafe) {
				printRecovery(w, lost)
			}
			if in := c.InOrStdin(); errors.Is(err, recovery.ErrUnsafe) && canConfirm(in) {
				if err = confirmCluster(in, w, lost.Cluster); err == nil {
					lost, err = recovery.Recover(cfg.Dir(), true)
				}
			}
			if err != nil {
				return err
			}
			fmt.Fprintf(w, "This replica is the only member of its raft cluster. Start it with "+
				"'keelson-controlplane run'. On every "+
				"other machine run\n"+
				"'keelson-controlplane rebuild --server %s' (or 'join' where the disk is new), then 'run'.\n",
				lost.Address)
			printReset(w, lost.Addresses, lost.Address)
			return nil
		},
	}
	addOfflineFlags(c, &cfg)
	c.Flags().BoolVar(&confirmed, "unsafe-lost-majority", false,
		"recover without a prompt, because a majority is permanently lost; if neither this flag nor a terminal is "+
			"present, the command only prints what would be lost")
	return c
}

func rebuildCommand() *cobra.Command {
	var cfg server.Config
	var servers []string
	c := &cobra.Command{
		Use:   "rebuild",
		Short: "Rebuild the data of this replica from the other replicas",
		Long: "Rebuild the data of this replica from the other replicas, if its own data is corrupt or lost.\n" +
			"Existing data is moved aside.\n" +
			"\n" +
			"At the next start, this replica is removed from the raft cluster, so that it cannot vote without\n" +
			"its previous log. It then joins again as a new replica. The other replicas must have a quorum.",
		Example: "  keelson-controlplane rebuild\n  keelson-controlplane rebuild --server 192.0.2.12",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := recovery.Rebuild(cfg.Dir(), servers)
			if err != nil {
				return err
			}
			w := c.OutOrStdout()
			if r.MovedTo != "" {
				fmt.Fprintf(w, "the previous data is in %s\n", r.MovedTo)
			}
			fmt.Fprintf(w, "Start this replica with 'keelson-controlplane run': it copies the data from %s.\n",
				strings.Join(r.JoinVia, ", "))
			return nil
		},
	}
	addOfflineFlags(c, &cfg)
	c.Flags().StringArrayVar(&servers, "server", nil,
		"address of a replica from which the data is copied (repeatable; default: the last known replicas)")
	return c
}

func convertCommand() *cobra.Command {
	var cfg server.Config
	to := ""
	c := &cobra.Command{
		Use:   "convert-log --to wal|bolt",
		Short: "Convert the raft log of this replica to another format",
		Long: "Convert the raft log of this replica to another format: bolt is one file with an index; wal is a\n" +
			"sequence of segment files, which writes less to the disk. If the conversion is interrupted, the\n" +
			"log is complete in the old or in the new format. Replicas can have different formats.",
		Example: "  keelson-controlplane convert-log --to wal",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var printedAt time.Time
			err := recovery.ConvertLog(c.Context(), cfg.Dir(), to, func(done, total uint64) {
				if now := time.Now(); now.Sub(printedAt) > time.Second || done == total {
					printedAt = now
					fmt.Fprintf(c.ErrOrStderr(), "%d of %d entries\n", done, total)
				}
			})
			if err != nil {
				return err
			}
			fmt.Fprintf(c.OutOrStdout(), "the format of the raft log is now %s\n", to)
			return nil
		},
	}
	addOfflineFlags(c, &cfg)
	c.Flags().StringVar(&to, "to", "", "format to which the raft log is converted: wal or bolt")
	return c
}

func keysCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "keys",
		Short: "Manage the key file that encrypts the store on disk",
		Long: "Manage the key file that encrypts the store on disk. Every replica needs the same key file. If it\n" +
			"is lost, the data is lost: keep a copy in another place.\n" +
			"\n" +
			"To change the key, run 'keys add' and copy the file to every replica. Running replicas reload it.\n" +
			"Remove the line of the previous key when no backup needs it any longer.",
		Example: "  keelson-controlplane keys init /etc/keelson/keys\n  keelson-controlplane keys add " +
			"/etc/keelson/keys\n  keelson-controlplane keys list /etc/keelson/keys",
	}
	id := ""
	verb := func(use, short string, do func(w io.Writer, path, id string) error) *cobra.Command {
		return &cobra.Command{
			Use: use + " FILE", Short: short, Args: cobra.ExactArgs(1),
			Example: "  keelson-controlplane keys " + use + " /etc/keelson/keys",
			RunE: func(c *cobra.Command, args []string) error {
				if id == "" {
					id = "key-" + time.Now().UTC().Format("20060102-150405")
				}
				return do(c.OutOrStdout(), args[0], id)
			},
		}
	}
	initial := verb("init", "Create a key file with one key", func(w io.Writer, path, id string) error {
		if err := disk.CreateKeyFile(path, id); err != nil {
			return err
		}
		fmt.Fprintf(w, "%s contains key %s. Copy it to every replica, and start them with --encryption-keys %s\n",
			path, id, path)
		return nil
	})
	add := verb("add", "Add a key, which encrypts all new data", func(w io.Writer, path, id string) error {
		if err := disk.AddKey(path, id); err != nil {
			return err
		}
		fmt.Fprintf(w, "%s now encrypts with key %s. Copy the file to every replica.\n", path, id)
		return nil
	})
	for _, v := range []*cobra.Command{initial, add} {
		v.Flags().StringVar(&id, "id", "", "name of the new key (default: the current time)")
	}
	list := verb("list", "List the keys of a key file, without their secrets", func(w io.Writer, path, _ string) error {
		k, err := disk.LoadKeyring(path)
		if err != nil {
			return err
		}
		t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
		fmt.Fprintln(t, "KEY\tUSE")
		for _, id := range k.IDs() {
			use := "decrypts"
			if id == k.Current() {
				use = "encrypts and decrypts"
			}
			fmt.Fprintf(t, "%s\t%s\n", id, use)
		}
		return t.Flush()
	})
	c.AddCommand(initial, add, list)
	return c
}

func inspectCommand() *cobra.Command {
	var cfg server.Config
	c := &cobra.Command{
		Use:   "inspect",
		Short: "Inspect the data directory of this replica",
		Long: "Inspect the data directory of this replica: show its members, its log, its snapshots and its keys.\n" +
			"Damaged files are listed. Nothing is changed.",
		Example: "  keelson-controlplane inspect",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			i, err := recovery.Inspect(cfg.Dir())
			if i.Cluster.ID == "" {
				return err
			}
			if werr := printInspection(c.OutOrStdout(), i); werr != nil {
				return werr
			}
			return err
		},
	}
	addOfflineFlags(c, &cfg)
	return c
}

func printInspection(w io.Writer, i recovery.Inspection) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, name+"\t"+format+"\n", args...) }
	row("cluster", "%s (%s)", i.Cluster.Name, i.Cluster.ID)
	if i.Disk.Owner == "" {
		row("replica", "none: there is no store data")
	} else {
		row("replica", "%s", i.Disk.Owner)
	}
	if i.Joining {
		row("state", "requests membership at the next start")
	}
	for _, name := range slices.Sorted(maps.Keys(i.Members)) {
		row("member", "%s at %s", name, i.Members[name])
	}
	switch {
	case i.Disk.Last > 0:
		row("log", "%s, entries %d to %d", i.Disk.LogStore, i.Disk.First, i.Disk.Last)
	case i.Disk.LogStore != "":
		row("log", "%s, no entries", i.Disk.LogStore)
	}
	if index, term := recovery.LastEntry(i.Disk); index > 0 {
		row("last entry", "%d of term %d", index, term)
	}
	row("disk", "%s", formatSize(i.Disk.Bytes))
	if len(i.Disk.Sealed) > 0 {
		row("keys", "%s", strings.Join(i.Disk.Sealed, ", "))
	}
	for _, s := range i.Disk.Snapshots {
		what := fmt.Sprintf("revision %d", s.Revision)
		if s.Sealed {
			what = "encrypted"
		}
		row("snapshot", "%s: entry %d, %s, %s, %s", s.File, s.Index, what, formatSize(s.Bytes),
			s.Taken.UTC().Format(time.RFC3339))
	}
	return t.Flush()
}
