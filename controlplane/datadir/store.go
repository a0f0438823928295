package datadir

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
)

// FormerKeysFile is the name of the file with previous store keys, beside the current key file. Only
// backups that were made before a rotation need these keys.
const FormerKeysFile = "store-former.keys"

// StoreOptions are what an operator may choose of the store. Zero values mean
// its defaults.
type StoreOptions struct {
	LogStore string // "bolt" or "wal"; "" = what the folder was made with or converted to
	Quota    int64  // bytes of state and history at which the store takes nothing new
	// file of keys that encrypt what is on disk; "" = that of the data folder, where there is one
	Keys string
	// Identity is a file of age identities, for a backup that is sealed by age; "" = none. Only backups are read with it.
	Identity         string
	HistoryRevisions int           // revisions kept for watches
	HistoryAge       time.Duration // and for how long
	SnapshotBytes    int64         // bytes of log after which a snapshot is taken
	CompareEvery     time.Duration // how often the replicas' states are compared; negative = never
	// Heartbeat is for how long a replica hears nothing of its leader before it calls an election, and a leader nothing of a
	// majority before it gives up; 0 = DefaultHeartbeat. No read and no write is wrong for it: both ask a majority.
	Heartbeat time.Duration
}

// DefaultHeartbeat is short: an outage of a leader is one of all writes.
const DefaultHeartbeat = 600 * time.Millisecond

// The least that makes sense.
const (
	MinQuota         = 16 << 20
	MinSnapshotBytes = 1 << 20
	minHistory       = 1000
	minHistoryAge    = time.Second
	minCompare       = time.Second
	minHeartbeat     = 200 * time.Millisecond
	maxHeartbeat     = 10 * time.Second
)

// Check names the flag that is wrong.
func (o StoreOptions) Check() error {
	switch {
	case o.LogStore != "" && o.LogStore != string(disk.LogBolt) && o.LogStore != string(disk.LogWAL):
		return fmt.Errorf("--log-store %q: want %s or %s", o.LogStore, disk.LogBolt, disk.LogWAL)
	case o.Quota != 0 && o.Quota < MinQuota:
		return fmt.Errorf("--store-quota %d bytes: want at least 16Mi", o.Quota)
	case o.HistoryRevisions != 0 && o.HistoryRevisions < minHistory:
		return fmt.Errorf("--history-revisions %d: want at least %d: watches of clients that were away for a moment would have to begin again", o.HistoryRevisions, minHistory)
	case o.HistoryAge != 0 && o.HistoryAge < minHistoryAge:
		return fmt.Errorf("--history-age %s: want at least %s", o.HistoryAge, minHistoryAge)
	case o.SnapshotBytes != 0 && o.SnapshotBytes < MinSnapshotBytes:
		return fmt.Errorf("--snapshot-bytes %d: want at least 1Mi", o.SnapshotBytes)
	case o.Heartbeat != 0 && (o.Heartbeat < minHeartbeat || o.Heartbeat > maxHeartbeat):
		return fmt.Errorf("--heartbeat-timeout %s: want %s to %s: below, a busy machine loses its leader for nothing; above, writes stand still for as long as that when a machine fails",
			o.Heartbeat, minHeartbeat, maxHeartbeat)
	case o.CompareEvery > 0 && o.CompareEvery < minCompare:
		return fmt.Errorf("--compare-interval %s: want at least %s, or a negative one for never", o.CompareEvery, minCompare)
	}
	return nil
}

// Keyring reads the keys of --encryption-keys; nil when none exist.
func (o StoreOptions) Keyring() (*disk.Keyring, error) {
	if o.Keys == "" {
		return nil, nil
	}
	k, err := disk.LoadKeyring(o.Keys)
	if err != nil {
		return nil, fmt.Errorf("--encryption-keys: %w", err)
	}
	return k, nil
}

// LoadBackupKeys returns the keys of the key file at path and of FormerKeysFile beside it. The
// previous keys are needed to read backups that were made before a key rotation.
func LoadBackupKeys(path string) (*disk.Keyring, error) {
	k, err := disk.LoadKeyring(path)
	if err != nil {
		return nil, err
	}
	former, err := disk.LoadKeyring(filepath.Join(filepath.Dir(path), FormerKeysFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return k, nil
	case err != nil:
		return nil, err
	}
	return k.With(former)
}

// NoKeys, in the place of a key file, says that the stores of the cluster are not encrypted.
const NoKeys = "none"

// KeyFile is where a replica keeps the key file that Init made, or that it
// received when it joined.
func KeyFile(dataDir string) string { return filepath.Join(dataDir, PKIFolder, pki.FileStoreKeys) }

// StoreKeyFile is the key file to use: the one that was chosen, or that of the data
// folder; "" when the store is not encrypted.
func (d Dir) StoreKeyFile(cluster Cluster) (string, error) {
	switch {
	case d.Store.Keys == NoKeys && cluster.Encrypted:
		return "", fmt.Errorf("--encryption-keys %s: cluster %s was made with encryption: a line 'clear' at the beginning of its key file "+
			"has new data written in clear", NoKeys, cluster.Name)
	case d.Store.Keys == NoKeys:
		return "", nil
	case d.Store.Keys != "":
		return d.Store.Keys, nil
	}
	own := KeyFile(d.Path)
	switch _, err := os.Stat(own); {
	case err == nil:
		return own, nil
	case !errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("the key file of the store: %w", err)
	case cluster.Encrypted:
		return "", fmt.Errorf("the stores of cluster %s are encrypted: %w: copy %s from another replica, "+
			"or give --encryption-keys FILE", cluster.Name, disk.ErrSealed, own)
	}
	return "", nil
}

// NewKeys is the key file that Init makes; nil when the operator keeps one elsewhere or wants none.
func (o StoreOptions) NewKeys(now time.Time) ([]byte, error) {
	switch o.Keys {
	case NoKeys:
		return nil, nil
	case "":
		// Keys of two clusters may come together where one takes the other's backup: those of one second have other names, too.
		var own [4]byte
		_, _ = rand.Read(own[:]) // it never fails
		return disk.NewKeys(fmt.Sprintf("init-%s-%x", now.UTC().Format("20060102-150405"), own))
	}
	_, err := o.Keyring()
	return nil, err
}

// chosen is what storeFile remembers.
type chosen struct {
	LogStore string `json:"logStore"`
}

// SaveLogStore records the kind of log store of the data folder. The record also applies after the
// data in the folder has been removed and is created again.
func (d Dir) SaveLogStore(logStore string) error {
	return WriteJSON(filepath.Join(d.Path, storeFile), chosen{logStore})
}

// logStore is the log store that the flag names, or that the folder has.
func (d Dir) logStore() (disk.LogStoreKind, error) {
	if d.Store.LogStore != "" {
		return disk.LogStoreKind(d.Store.LogStore), nil
	}
	var was chosen
	_, err := ReadJSON(filepath.Join(d.Path, storeFile), &was)
	return disk.LogStoreKind(was.LogStore), err
}

// StoreConfig is the configuration of the store on this replica's disk, without what
// a running one needs besides.
func (d Dir) StoreConfig(cluster Cluster) (replica.Config, error) {
	var err error
	if d.Store.Keys, err = d.StoreKeyFile(cluster); err != nil {
		return replica.Config{}, err
	}
	keys, err := d.Store.Keyring()
	if err != nil {
		return replica.Config{}, err
	}
	kind, err := d.logStore()
	if err != nil {
		return replica.Config{}, err
	}
	log := d.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	out := replica.Config{
		Name: d.Name, DataDir: filepath.Join(d.Path, RaftFolder), Cluster: cluster.ID,
		LogStore: kind, Keys: keys, Quota: d.Store.Quota,
		HistoryRevisions: d.Store.HistoryRevisions, HistoryAge: d.Store.HistoryAge,
		SnapshotBytes: d.Store.SnapshotBytes, CompareEvery: d.Store.CompareEvery, HeartbeatTimeout: d.Store.Heartbeat,
		Logger: log.With("part", "store"),
	}
	if d.Advertise != "" {
		out.Advertise = HostPort(d.Advertise, cluster.PeerPort)
	}
	return out, nil
}

// OfflineStoreConfig is the store's configuration with the address that the replica
// had last, where none is given.
func (d Dir) OfflineStoreConfig(cluster Cluster) (replica.Config, error) {
	d, err := d.WithAddress()
	if err != nil {
		return replica.Config{}, err
	}
	return d.StoreConfig(cluster)
}

// StoreConfigToRun is the same for a store that is about to run: it refuses a disk
// that must not take part in the group.
func (d Dir) StoreConfigToRun(cluster Cluster) (replica.Config, error) {
	founds, err := d.founds()
	if err != nil {
		return replica.Config{}, err
	}
	out, err := d.StoreConfig(cluster)
	if err != nil {
		return out, err
	}
	out.Bootstrap = founds
	has, err := d.HasRaftData()
	if err == nil && !has && d.Store.LogStore != "" {
		err = d.SaveLogStore(d.Store.LogStore)
	}
	return out, err
}

// ErrDataGone says that a replica which took part in the group has lost its disk.
var ErrDataGone = errors.New("the data of this replica is gone, but it was a member of the group: " +
	"it must not vote with an empty log. Run 'rebuild' to take the data from the other replicas, or 'restore' with a backup")

// founds says whether this replica founds a group, and refuses one that would
// take part in its own without what it has promised there.
func (d Dir) founds() (bool, error) {
	if _, err := os.Stat(filepath.Join(d.Path, PeersFile)); err == nil {
		return false, nil // it joins
	}
	has, err := d.HasRaftData()
	if err != nil {
		return false, err
	}
	members, err := d.Members()
	if err != nil {
		return false, err
	}
	_, was := members[d.Name]
	if !has && (was || !d.IsFounder()) {
		return false, fmt.Errorf("%s: %w", filepath.Join(d.Path, RaftFolder), ErrDataGone)
	}
	return d.IsFounder() && !was, nil
}
