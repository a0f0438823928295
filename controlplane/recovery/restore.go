package recovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery/backups"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica"
)

// RestoreOptions are the options of Restore. With the zero value, the replica must have no data,
// and the backup must be of its own cluster.
type RestoreOptions struct {
	AnyCluster bool   // accept a backup of another cluster
	Replace    bool   // move existing data of the replica to another directory
	BackupKeys string // key file for a backup that cannot be decrypted with the store's keys
	Identity   string // file of age identities, for a backup that is encrypted with age
	// LeaveOthers allows a restore while other replicas run. The restore excludes these replicas:
	// they continue as a second cluster with the old data.
	LeaveOthers bool

	unchanged bool // restore the state without changes, including join tokens; set only to serve a backup
}

// RestoreReport is the result of Restore.
type RestoreReport struct {
	Backup  disk.BackupInfo
	MovedTo string   // directory to which the previous data was moved; empty if there was no data
	Address string   // host of this replica, to which other replicas connect to join
	Revoked []string // nodes with a revocation that was copied from the previous data
	// Abandoned maps the names of the other members before the restore to their peer addresses. The
	// data of these replicas must be replaced before they start again.
	Abandoned map[string]string
	Joined    []string // nodes that were copied from the previous data because they joined after the backup
	Tokens    int      // number of join tokens that were deleted from the backup's state
	// Unread is the reason why Revoked and Joined may be incomplete. It is nil if they are
	// complete.
	Unread error
}

// ErrOthersRun is returned by Restore if other replicas of the cluster are running, because a
// restore would create a second cluster.
var ErrOthersRun = errors.New("other replicas of this cluster are running")

// requireOthersStopped returns ErrOthersRun if another member of this replica's raft cluster
// accepts connections. The restored cluster has the same keys as these members, so agents and
// clients could connect to either cluster.
func requireOthersStopped(d datadir.Dir) error {
	members, err := d.Members()
	if err != nil {
		return err
	}
	delete(members, d.Name)
	if running := reachableMembers(members); len(running) > 0 {
		return fmt.Errorf("%w: %s. A restore would create a second cluster with the same keys: stop their "+
			"daemons first, or set --leave-others-behind", ErrOthersRun, strings.Join(running, ", "))
	}
	return nil
}

// Restore makes this replica the only member of a new raft cluster, with the state in the backup
// file path. It changes that state: it deletes join tokens, copies revocations and new Nodes from
// the previous data, and marks all volumes as not attached (volumeResetOps). It changes nothing on
// disk unless the whole backup is valid.
func Restore(d datadir.Dir, path string, o RestoreOptions) (RestoreReport, error) {
	cluster, release, err := d.Open()
	if err != nil {
		return RestoreReport{}, err
	}
	defer release()
	conf, err := d.OfflineStoreConfig(cluster)
	if err == nil {
		err = requireAddress(conf)
	}
	if err != nil {
		return RestoreReport{}, err
	}
	if conf.Storage.Keys, err = BackupKeyring(d, cluster, o.BackupKeys); err != nil {
		return RestoreReport{}, err
	}
	f, err := os.Open(path)
	if err != nil {
		return RestoreReport{}, err
	}
	defer f.Close()
	in, _, err := backups.Open(f, o.Identity)
	if err != nil {
		return RestoreReport{}, fmt.Errorf("%s: %w", path, err)
	}
	out := RestoreReport{Address: advertisedHost(conf)}
	var stored []byte
	out.Backup, stored, err = disk.ReadBackupValue(in, conf.Storage.Keys, datadir.LevelKey)
	if err != nil && !errors.Is(err, disk.ErrSealed) {
		return out, fmt.Errorf("%s: %w", path, err)
	}
	if got := out.Backup.Cluster; got != cluster.ID && !o.AnyCluster { // the header is readable without a key
		return out, fmt.Errorf("%s belongs to cluster %q, not to %q: %w: set --any-cluster to restore it "+
			"nevertheless",
			path, got, cluster.ID, disk.ErrForeignBackup)
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w: --backup-keys must name the key file of the backup", path, err)
	}
	var rec datadir.LevelRecord
	if stored != nil {
		if rec, err = datadir.DecodeLevel(stored); err == nil {
			err = rec.CheckSupported(d.FeatureLevel)
		}
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w", path, err)
	}
	if _, err := in.Seek(0, io.SeekStart); err != nil {
		return out, err
	}
	if out.Abandoned, err = d.Members(); err != nil {
		return out, err
	}
	delete(out.Abandoned, d.Name)
	if !o.LeaveOthers {
		if err := requireOthersStopped(d); err != nil {
			return out, err
		}
	}
	to := disk.RestoreOptions{Advertise: conf.Network.Advertise, Cluster: conf.Cluster, AnyCluster: o.AnyCluster}
	previous := newPreviousData()
	if !o.unchanged {
		out.Unread = loadPreviousData(d, conf, o.Replace, &previous)
		previous.otherCluster = out.Backup.Cluster != cluster.ID
		to.Amend = func(v *mvcc.View) ([]raftstore.Op, error) {
			ops, err := previous.restoreOps(v)
			if err != nil {
				return nil, err
			}
			identify, err := incarnationOps(d, v, previous.identity, out.Abandoned)
			return append(ops, identify...), err
		}
	}
	if out.MovedTo, to.Above, err = moveDataAside(d, conf, o.Replace); err != nil {
		return out, err
	}
	to.Above = max(to.Above, previous.revision)
	if out.Backup, err = disk.Restore(conf.Disk(), in, to); err != nil {
		if out.MovedTo != "" {
			err = fmt.Errorf("%w (the previous data is in %s)", err, out.MovedTo)
		}
		return out, err
	}
	out.Revoked, out.Joined, out.Tokens = previous.revoked, previous.joined, previous.tokens
	if err := datadir.SaveLevel(d.Path, rec); err != nil { // it may be lower than the level of the previous data
		return out, err
	}
	return out, recordSoleMember(d, conf)
}

// BackupKeyring returns the keys that can decrypt a backup: the current and the previous keys of
// the store. If keyFile is not empty, the result also contains the keys in that file.
func BackupKeyring(d datadir.Dir, cluster datadir.Cluster, keyFile string) (keys *disk.Keyring, err error) {
	own, err := d.StoreKeyFile(cluster)
	if err != nil {
		return nil, err
	}
	if own != "" {
		if keys, err = datadir.LoadBackupKeys(own); err != nil {
			return nil, fmt.Errorf("--encryption-keys: %w", err)
		}
	}
	if keyFile == "" {
		return keys, nil
	}
	further, err := datadir.LoadBackupKeys(keyFile)
	if err == nil {
		keys, err = keys.Merge(further)
	}
	if err != nil {
		return nil, fmt.Errorf("--backup-keys: %w", err)
	}
	return keys, nil
}

// moveDataAside moves the raft data of this replica to another directory, and returns that
// directory. It returns an error if data exists and replace is false. newestSnapshot is the
// revision of the newest snapshot in the data; the data itself may be newer.
func moveDataAside(d datadir.Dir, conf replica.Config, replace bool) (
	moved string, newestSnapshot raftstore.Revision, err error,
) {
	has, err := d.HasRaftData()
	if err != nil || !has {
		return "", 0, err
	}
	info, _, err := inspectDisk(d, conf)
	if err != nil {
		return "", 0, err
	}
	if !replace {
		return "", 0, fmt.Errorf("%s: %w: set --replace to move the existing data aside", conf.Storage.DataDir,
			disk.ErrNotEmpty)
	}
	for _, s := range info.Snapshots {
		newestSnapshot = max(newestSnapshot, s.Revision)
	}
	moved, err = disk.SetAside(conf.Disk())
	return moved, newestSnapshot, err
}

// incarnationOps returns the operation that stores the identity record of a new incarnation of the
// cluster, which each recovery or restore starts. The new incarnation has a higher number than all
// known incarnations, so that replicas with data from before are detected. v is the state to which
// the operation is applied. replaced is the identity record of the data that a restore replaces.
// abandoned maps the names of the replicas that are not part of the new incarnation to their
// addresses.
func incarnationOps(
	d datadir.Dir, v *mvcc.View, replaced datadir.IdentityRecord, abandoned map[string]string,
) ([]raftstore.Op, error) {
	found, err := d.AbandonedBy()
	if err != nil {
		return nil, err
	}
	stored := datadir.ReadIdentity(v)
	known := max(replaced.Incarnation, stored.Incarnation)
	if found != nil {
		known = max(known, found.Newest)
	}
	rec := datadir.IdentityRecord{Version: datadir.IdentityVersion, Incarnation: clusterid.Next(known, time.Now()),
		Abandoned: map[string]string{}}
	// If a name is in several lists, the newest address is used.
	for _, list := range []map[string]string{abandoned, replaced.Abandoned, stored.Abandoned} {
		for _, name := range slices.Sorted(maps.Keys(list)) {
			if _, has := rec.Abandoned[name]; !has && len(rec.Abandoned) < datadir.MaxAbandoned {
				rec.Abandoned[name] = list[name]
			}
		}
	}
	value, err := json.Marshal(rec)
	if err != nil {
		return nil, err
	}
	return []raftstore.Op{raftstore.Put(datadir.IdentityKey, value)}, nil
}
