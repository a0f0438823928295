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

// FormerKeysFile is the name of the file with the previous encryption keys of the store. It is in
// the same folder as the file with the current keys. The previous keys decrypt backups that were
// made before a key rotation.
const FormerKeysFile = "store-former.keys"

// StoreOptions are the settings of a replica's store. Zero values mean the store's defaults.
type StoreOptions struct {
	LogStore string // format of the raft log, "bolt" or "wal"; empty: the format of the existing log
	Quota    int64  // maximum size of the state and the watch history in bytes; above it, the store rejects new data
	// Keys is the path of the file with the keys that encrypt the store on disk. If it is empty,
	// the key file in the data directory is used, if that file exists.
	Keys string
	// Identity is the path of a file of age identities, which decrypt a backup that is encrypted
	// with age. It is used only to read backups.
	Identity         string
	HistoryRevisions int           // maximum number of revisions in the watch history
	HistoryAge       time.Duration // maximum age of revisions in the watch history
	SnapshotBytes    int64         // size of the raft log in bytes at which a snapshot is taken
	CompareEvery     time.Duration // interval at which the replicas' states are compared; negative = never
	// Heartbeat is how long a replica waits for its leader before it starts an election. 0 means
	// DefaultHeartbeat. A leader without a quorum steps down after the same time. Reads and writes
	// are correct with any value, because both need a quorum.
	Heartbeat time.Duration
}

// DefaultHeartbeat is the default of StoreOptions.Heartbeat. It is short because no write succeeds
// without a leader.
const DefaultHeartbeat = 600 * time.Millisecond

// Limits of StoreOptions. MinQuota and MinSnapshotBytes are in bytes, and minHistory is a number of
// revisions.
const (
	MinQuota         = 16 << 20
	MinSnapshotBytes = 1 << 20
	minHistory       = 1000
	minHistoryAge    = time.Second
	minCompare       = time.Second
	minHeartbeat     = 200 * time.Millisecond
	maxHeartbeat     = 10 * time.Second
)

// Check returns an error if an option is invalid. The error names its flag.
func (o StoreOptions) Check() error {
	switch {
	case o.LogStore != "" && o.LogStore != string(disk.LogBolt) && o.LogStore != string(disk.LogWAL):
		return fmt.Errorf("--log-store %q: want %s or %s", o.LogStore, disk.LogBolt, disk.LogWAL)
	case o.Quota != 0 && o.Quota < MinQuota:
		return fmt.Errorf("--store-quota %d bytes: want at least 16Mi", o.Quota)
	case o.HistoryRevisions != 0 && o.HistoryRevisions < minHistory:
		return fmt.Errorf("--history-revisions %d: want at least %d: otherwise the watches of clients end after "+
			"a short disconnection", o.HistoryRevisions, minHistory)
	case o.HistoryAge != 0 && o.HistoryAge < minHistoryAge:
		return fmt.Errorf("--history-age %s: want at least %s", o.HistoryAge, minHistoryAge)
	case o.SnapshotBytes != 0 && o.SnapshotBytes < MinSnapshotBytes:
		return fmt.Errorf("--snapshot-bytes %d: want at least 1Mi", o.SnapshotBytes)
	case o.Heartbeat != 0 && (o.Heartbeat < minHeartbeat || o.Heartbeat > maxHeartbeat):
		return fmt.Errorf("--heartbeat-timeout %s: want %s to %s: a lower value causes elections on a busy "+
			"machine, and a higher value blocks writes longer after a failure",
			o.Heartbeat, minHeartbeat, maxHeartbeat)
	case o.CompareEvery > 0 && o.CompareEvery < minCompare:
		return fmt.Errorf("--compare-interval %s: want at least %s, or a negative value to disable it",
			o.CompareEvery, minCompare)
	}
	return nil
}

// Keyring returns the keys in the file o.Keys. It returns nil if o.Keys is empty.
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

// LoadBackupKeys returns the encryption keys in the file path and in FormerKeysFile in the same
// folder. The latter decrypt backups that were made before a key rotation.
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
	return k.Merge(former)
}

// NoKeys is the value of StoreOptions.Keys that disables the encryption of the cluster's stores.
const NoKeys = "none"

// KeyFile returns the path of the file with the store's encryption keys in the data directory
// dataDir. Init creates the file, and a joining replica receives it.
func KeyFile(dataDir string) string { return filepath.Join(dataDir, PKIFolder, pki.FileStoreKeys) }

// StoreKeyFile returns the path of the file with the store's encryption keys: the configured file,
// or the file in the data directory. It returns "" if the store is not encrypted.
func (d Dir) StoreKeyFile(cluster Cluster) (string, error) {
	switch {
	case d.Store.Keys == NoKeys && cluster.Encrypted:
		return "",
			fmt.Errorf("--encryption-keys %s: cluster %s was created with encryption: to write new data "+
				"unencrypted, add a line 'clear' at the beginning of its key file", NoKeys, cluster.Name)
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

// NewKeys returns the content of the key file that Init creates. It returns nil if the operator
// provides a key file or disables encryption.
func (o StoreOptions) NewKeys(now time.Time) ([]byte, error) {
	switch o.Keys {
	case NoKeys:
		return nil, nil
	case "":
		// When a cluster restores the backup of another cluster, the keys of both are merged. The
		// random part of the name distinguishes keys that were created in the same second.
		var own [4]byte
		_, _ = rand.Read(own[:]) // it never fails
		return disk.GenerateKeyFile(fmt.Sprintf("init-%s-%x", now.UTC().Format("20060102-150405"), own))
	}
	_, err := o.Keyring()
	return nil, err
}

// storeRecord is the content of storeFile.
type storeRecord struct {
	LogStore string `json:"logStore"`
}

// SaveLogStore records logStore, the format of the raft log in the data directory. The record is
// also used when the raft data has been removed and is created again.
func (d Dir) SaveLogStore(logStore string) error {
	return WriteJSON(filepath.Join(d.Path, storeFile), storeRecord{logStore})
}

// logStore returns the configured format of the raft log. If no format is configured, it returns
// the format that SaveLogStore has recorded.
func (d Dir) logStore() (disk.LogStoreKind, error) {
	if d.Store.LogStore != "" {
		return disk.LogStoreKind(d.Store.LogStore), nil
	}
	var was storeRecord
	_, err := ReadJSON(filepath.Join(d.Path, storeFile), &was)
	return disk.LogStoreKind(was.LogStore), err
}

// StoreConfig returns the configuration of the store in this data directory. To run the store, the
// caller must set further fields, such as the listener.
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
		Name: d.Name, Cluster: cluster.ID, Quota: d.Store.Quota, CompareEvery: d.Store.CompareEvery,
		Storage:   replica.Storage{DataDir: filepath.Join(d.Path, RaftFolder), LogStore: kind, Keys: keys},
		History:   replica.History{HistoryRevisions: d.Store.HistoryRevisions, HistoryAge: d.Store.HistoryAge},
		Snapshots: replica.Snapshots{SnapshotBytes: d.Store.SnapshotBytes},
		Timeouts:  replica.Timeouts{HeartbeatTimeout: d.Store.Heartbeat},
		Logger:    log.With("part", "store"),
	}
	if d.Advertise != "" {
		out.Network.Advertise = HostPort(d.Advertise, cluster.PeerPort)
	}
	return out, nil
}

// OfflineStoreConfig is like StoreConfig. If no address is configured, it uses the last address of
// the replica.
func (d Dir) OfflineStoreConfig(cluster Cluster) (replica.Config, error) {
	d, err := d.WithAddress()
	if err != nil {
		return replica.Config{}, err
	}
	return d.StoreConfig(cluster)
}

// StoreConfigToRun is like StoreConfig, for a store that is about to run. It returns ErrDataGone if
// this replica has lost its data and must therefore not take part in the raft cluster.
func (d Dir) StoreConfigToRun(cluster Cluster) (replica.Config, error) {
	founds, err := d.bootstrapsCluster()
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

// ErrDataGone is returned if this replica was a member of the raft cluster and has lost its raft
// data.
var ErrDataGone = errors.New("the data of this replica is missing, but it was a member of the raft cluster: it " +
	"must not vote with an empty log. Run 'rebuild' to copy the data from the other replicas, or " +
	"'restore' with a backup")

// bootstrapsCluster reports whether this replica must bootstrap the raft cluster, because it
// created the cluster and is not recorded as a member yet. It returns ErrDataGone for a replica
// that has lost its raft data: such a replica has also lost its votes and the log entries that it
// has acknowledged.
func (d Dir) bootstrapsCluster() (bool, error) {
	if _, err := os.Stat(filepath.Join(d.Path, PeersFile)); err == nil {
		return false, nil // the replica is joining
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
