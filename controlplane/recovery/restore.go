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

// RestoreOptions say what Restore may do beyond filling an empty replica.
type RestoreOptions struct {
	AnyCluster bool   // take a backup of another cluster
	Replace    bool   // move the replica's own data aside
	BackupKeys string // file of keys for a backup that is encrypted under none of the store's
	Identity   string // file of age identities for a backup that is sealed by age
	// Beside restores although other replicas answer: their cluster is left behind.
	Beside bool

	asItIs bool // to be looked at: join tokens are there, too
}

// Restored is what Restore did.
type Restored struct {
	Backup  disk.BackupInfo
	Moved   string   // the folder of the previous data; "" if there was none
	Address string   // of this replica, for the others to ask
	Revoked []string // nodes whose revocation was carried over from the previous data
	// Abandoned are the peer addresses of the replicas that were members, by name: their data must be replaced before they start.
	Abandoned map[string]string
	Joined    []string // nodes that joined after the backup was made, from the previous data: each must report its volumes
	Tokens    int      // join tokens of the backup, which are invalid
	// Unread is why it is not known, or not for certain, who joined or was revoked since the backup was made; nil when it is.
	Unread error
}

// ErrOthersRun says that a restore would make a second cluster beside one that serves.
var ErrOthersRun = errors.New("other replicas of this cluster answer")

// noneRuns refuses a restore while members of this replica's group run: with the keys of both groups the same, agents and
// clients would come to the one or the other.
func noneRuns(d datadir.Dir) error {
	members, err := d.Members()
	if err != nil {
		return err
	}
	delete(members, d.Name)
	if run := answering(members); len(run) > 0 {
		return fmt.Errorf("%w: %s. Restored beside them, there would be two clusters with the same keys: stop their daemons first, "+
			"or say --leave-others-behind where that is meant", ErrOthersRun, strings.Join(run, ", "))
	}
	return nil
}

// Restore makes this replica the first of a new group that holds what the
// backup holds. Nothing is changed unless the whole backup is good.
func Restore(d datadir.Dir, path string, o RestoreOptions) (Restored, error) {
	cluster, release, err := d.Open()
	if err != nil {
		return Restored{}, err
	}
	defer release()
	conf, err := d.OfflineStoreConfig(cluster)
	if err == nil {
		err = needAddress(conf)
	}
	if err != nil {
		return Restored{}, err
	}
	if conf.Keys, err = BackupKeyring(d, cluster, o.BackupKeys); err != nil {
		return Restored{}, err
	}
	f, err := os.Open(path)
	if err != nil {
		return Restored{}, err
	}
	defer f.Close()
	in, _, err := backups.Open(f, o.Identity)
	if err != nil {
		return Restored{}, fmt.Errorf("%s: %w", path, err)
	}
	out := Restored{Address: hostOf(conf)}
	var stored []byte
	out.Backup, stored, err = disk.FromBackup(in, conf.Keys, datadir.LevelKey)
	if err != nil && !errors.Is(err, disk.ErrSealed) {
		return out, fmt.Errorf("%s: %w", path, err)
	}
	if got := out.Backup.Cluster; got != cluster.ID && !o.AnyCluster { // its head is in clear
		return out, fmt.Errorf("%s is of cluster %q and this is %q: %w: say --any-cluster to take it all the same", path, got, cluster.ID, disk.ErrForeignBackup)
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w: --backup-keys names the key file of that time", path, err)
	}
	var rec datadir.LevelRecord
	if stored != nil {
		if rec, err = datadir.DecodeLevel(stored); err == nil {
			err = rec.CheckUnderstood(d.FeatureLevel)
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
	if !o.Beside {
		if err := noneRuns(d); err != nil {
			return out, err
		}
	}
	to := disk.RestoreOptions{Advertise: conf.Advertise, Cluster: conf.Cluster, AnyCluster: o.AnyCluster}
	with := newCarried()
	if !o.asItIs {
		out.Unread = carry(d, conf, o.Replace, &with)
		with.foreign = out.Backup.Cluster != cluster.ID
		to.Amend = func(v *mvcc.View) ([]raftstore.Op, error) {
			ops, err := with.amend(v)
			if err != nil {
				return nil, err
			}
			identify, err := startIncarnation(d, v, with.identity, out.Abandoned)
			return append(ops, identify...), err
		}
	}
	if out.Moved, to.Above, err = makeRoom(d, conf, o.Replace); err != nil {
		return out, err
	}
	to.Above = max(to.Above, with.revision)
	if out.Backup, err = disk.Restore(conf.Disk(), in, to); err != nil {
		if out.Moved != "" {
			err = fmt.Errorf("%w (the previous data is in %s)", err, out.Moved)
		}
		return out, err
	}
	out.Revoked, out.Joined, out.Tokens = with.revoked, with.joined, with.tokens
	if err := datadir.SaveLevel(d.Path, rec); err != nil { // it may be below that of the previous data
		return out, err
	}
	return out, recordAlone(d, conf)
}

// BackupKeyring returns the keys that can decrypt a backup: the keys of the store, its previous keys,
// and the keys in file, if file is not "".
func BackupKeyring(d datadir.Dir, cluster datadir.Cluster, file string) (keys *disk.Keyring, err error) {
	own, err := d.StoreKeyFile(cluster)
	if err != nil {
		return nil, err
	}
	if own != "" {
		if keys, err = datadir.LoadBackupKeys(own); err != nil {
			return nil, fmt.Errorf("--encryption-keys: %w", err)
		}
	}
	if file == "" {
		return keys, nil
	}
	further, err := datadir.LoadBackupKeys(file)
	if err == nil {
		keys, err = keys.With(further)
	}
	if err != nil {
		return nil, fmt.Errorf("--backup-keys: %w", err)
	}
	return keys, nil
}

// makeRoom moves this replica's data aside where there is some, and says of which revision it is at least.
func makeRoom(d datadir.Dir, conf replica.Config, replace bool) (moved string, was raftstore.Revision, err error) {
	has, err := d.HasRaftData()
	if err != nil || !has {
		return "", 0, err
	}
	info, _, err := inspectDisk(d, conf)
	if err != nil {
		return "", 0, err
	}
	if !replace {
		return "", 0, fmt.Errorf("%s: %w: say --replace to move what is there aside", conf.DataDir, disk.ErrNotEmpty)
	}
	for _, s := range info.Snapshots {
		was = max(was, s.Revision)
	}
	moved, err = disk.SetAside(conf.Disk())
	return moved, was, err
}

// startIncarnation returns the operation by which a recovery or restore starts a new incarnation
// of the cluster. was is the record of the data that is replaced, and abandoned are the replicas
// that are left behind, by name.
func startIncarnation(
	d datadir.Dir, v *mvcc.View, was datadir.IdentityRecord, abandoned map[string]string,
) ([]raftstore.Op, error) {
	found, err := d.AbandonedBy()
	if err != nil {
		return nil, err
	}
	stored := datadir.ReadIdentity(v)
	known := max(was.Incarnation, stored.Incarnation)
	if found != nil {
		known = max(known, found.Newest)
	}
	rec := datadir.IdentityRecord{Version: datadir.IdentityVersion, Incarnation: clusterid.Next(known, time.Now()), Abandoned: map[string]string{}}
	// The newest address of a name counts.
	for _, list := range []map[string]string{abandoned, was.Abandoned, stored.Abandoned} {
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
