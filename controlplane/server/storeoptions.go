package server

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
)

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
	minQuota         = 16 << 20
	minSnapshotBytes = 1 << 20
	minHistory       = 1000
	minHistoryAge    = time.Second
	minCompare       = time.Second
	minHeartbeat     = 200 * time.Millisecond
	maxHeartbeat     = 10 * time.Second
)

// check names the flag that is wrong.
func (o StoreOptions) check() error {
	switch {
	case o.LogStore != "" && o.LogStore != string(disk.LogBolt) && o.LogStore != string(disk.LogWAL):
		return fmt.Errorf("--log-store %q: want %s or %s", o.LogStore, disk.LogBolt, disk.LogWAL)
	case o.Quota != 0 && o.Quota < minQuota:
		return fmt.Errorf("--store-quota %d bytes: want at least 16Mi", o.Quota)
	case o.HistoryRevisions != 0 && o.HistoryRevisions < minHistory:
		return fmt.Errorf("--history-revisions %d: want at least %d: watches of clients that were away for a moment would have to begin again", o.HistoryRevisions, minHistory)
	case o.HistoryAge != 0 && o.HistoryAge < minHistoryAge:
		return fmt.Errorf("--history-age %s: want at least %s", o.HistoryAge, minHistoryAge)
	case o.SnapshotBytes != 0 && o.SnapshotBytes < minSnapshotBytes:
		return fmt.Errorf("--snapshot-bytes %d: want at least 1Mi", o.SnapshotBytes)
	case o.Heartbeat != 0 && (o.Heartbeat < minHeartbeat || o.Heartbeat > maxHeartbeat):
		return fmt.Errorf("--heartbeat-timeout %s: want %s to %s: below, a busy machine loses its leader for nothing; above, writes stand still for as long as that when a machine fails",
			o.Heartbeat, minHeartbeat, maxHeartbeat)
	case o.CompareEvery > 0 && o.CompareEvery < minCompare:
		return fmt.Errorf("--compare-interval %s: want at least %s, or a negative one for never", o.CompareEvery, minCompare)
	}
	return nil
}

// restless is from how many leaders within raftstore.LeadersWindow on an alarm tells of them: an upgrade of five replicas has fewer.
const restless = 10

// electionAlarms tell that the group elects again and again, and what helps.
func (o StoreOptions) electionAlarms(leaders int, now time.Time) []api.ClusterAlarm {
	if leaders < restless {
		return nil
	}
	within := o.Heartbeat
	if within == 0 {
		within = DefaultHeartbeat
	}
	return []api.ClusterAlarm{{
		Kind: "elections", Since: now.Add(-raftstore.LeadersWindow).UnixMilli(),
		Message: fmt.Sprintf("%d leaders in the last %.0f minutes: the replicas do not hear each other for longer than %s again and again, and everything waits for each election",
			leaders, raftstore.LeadersWindow.Minutes(), within),
		Remedy: "'role changed' in the replicas' logs names the silent ones: give their machines processors and disks of their own, " +
			"or run every replica with a longer --heartbeat-timeout (docs/explanation/leader-election.md)",
	}}
}

// keyring reads the keys of --encryption-keys; nil when there are none.
func (o StoreOptions) keyring() (*disk.Keyring, error) {
	if o.Keys == "" {
		return nil, nil
	}
	k, err := disk.LoadKeyring(o.Keys)
	if err != nil {
		return nil, fmt.Errorf("--encryption-keys: %w", err)
	}
	return k, nil
}

// backupKeys are the keys of a file, and those beside it that only backups of before an exchange of the key need: until the next
// backup is made there is none but such.
func backupKeys(path string) (*disk.Keyring, error) {
	k, err := disk.LoadKeyring(path)
	if err != nil {
		return nil, err
	}
	former, err := disk.LoadKeyring(filepath.Join(filepath.Dir(path), formerKeysFile))
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
func KeyFile(dataDir string) string { return filepath.Join(dataDir, pkiFolder, pki.FileStoreKeys) }

// ClusterID is the ID of the cluster that a data folder is of; "" where there is no such folder, or it cannot be read.
func ClusterID(dataDir string) string {
	var cluster Cluster
	if found, err := readJSON(filepath.Join(dataDir, clusterFile), &cluster); err != nil || !found {
		return ""
	}
	if cluster.ID == "" { // made before there were IDs
		var err error
		if cluster, _, err = (Config{DataDir: dataDir}).load(); err != nil {
			return ""
		}
	}
	return cluster.ID
}

// keyFile is the key file to use: the one that was chosen, or that of the data
// folder; "" when the store is not encrypted.
func (c Config) keyFile(cluster Cluster) (string, error) {
	switch {
	case c.Store.Keys == NoKeys && cluster.Encrypted:
		return "", fmt.Errorf("--encryption-keys %s: cluster %s was made with encryption: a line 'clear' at the beginning of its key file "+
			"has new data written in clear", NoKeys, cluster.Name)
	case c.Store.Keys == NoKeys:
		return "", nil
	case c.Store.Keys != "":
		return c.Store.Keys, nil
	}
	own := KeyFile(c.DataDir)
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

// storeKeys is the key file that Init makes; nil when the operator keeps one elsewhere or wants none.
func (o StoreOptions) storeKeys(now time.Time) ([]byte, error) {
	switch o.Keys {
	case NoKeys:
		return nil, nil
	case "":
		// Keys of two clusters may come together where one takes the other's backup: those of one second have other names, too.
		var own [4]byte
		_, _ = rand.Read(own[:]) // it never fails
		return disk.NewKeys(fmt.Sprintf("init-%s-%x", now.UTC().Format("20060102-150405"), own))
	}
	_, err := o.keyring()
	return nil, err
}

// chosen is what storeFile remembers.
type chosen struct {
	LogStore string `json:"logStore"`
}

// choose remembers the log store of a data folder, also for when the data in it begins anew.
func (c Config) choose(logStore string) error {
	return writeJSON(filepath.Join(c.DataDir, storeFile), chosen{logStore})
}

// logStore is the log store that the flag names, or that the folder has.
func (c Config) logStore() (disk.LogStoreKind, error) {
	if c.Store.LogStore != "" {
		return disk.LogStoreKind(c.Store.LogStore), nil
	}
	var was chosen
	_, err := readJSON(filepath.Join(c.DataDir, storeFile), &was)
	return disk.LogStoreKind(was.LogStore), err
}

// store is the configuration of the store on this replica's disk, without what
// a running one needs besides.
func (c Config) store(cluster Cluster) (replica.Config, error) {
	var err error
	if c.Store.Keys, err = c.keyFile(cluster); err != nil {
		return replica.Config{}, err
	}
	keys, err := c.Store.keyring()
	if err != nil {
		return replica.Config{}, err
	}
	kind, err := c.logStore()
	if err != nil {
		return replica.Config{}, err
	}
	log := c.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	out := replica.Config{
		Name: c.Name, DataDir: filepath.Join(c.DataDir, raftFolder), Cluster: cluster.ID,
		LogStore: kind, Keys: keys, Quota: c.Store.Quota,
		HistoryRevisions: c.Store.HistoryRevisions, HistoryAge: c.Store.HistoryAge,
		SnapshotBytes: c.Store.SnapshotBytes, CompareEvery: c.Store.CompareEvery, HeartbeatTimeout: c.Store.Heartbeat,
		Logger: log.With("part", "store"),
	}
	if c.Advertise != "" {
		out.Advertise = at(c.Advertise, cluster.PeerPort)
	}
	return out, nil
}

// storeToRun is the same for a store that is about to run: it refuses a disk
// that must not take part in the group.
func (c Config) storeToRun(cluster Cluster) (replica.Config, error) {
	founds, err := c.begins()
	if err != nil {
		return replica.Config{}, err
	}
	out, err := c.store(cluster)
	if err != nil {
		return out, err
	}
	out.Bootstrap = founds
	has, err := c.hasRaftData()
	if err == nil && !has && c.Store.LogStore != "" {
		err = c.choose(c.Store.LogStore)
	}
	return out, err
}

// identify gives the cluster the identity that its backups carry. It is made
// once and stays, whatever becomes of the keys it was made from.
func (c *Cluster) identify(trust *pki.Trust) error {
	if trust == nil {
		return errors.New("a cluster is known by its CA, and there is none")
	}
	if c.ID == "" {
		c.ID = c.Name + "-" + trust.CA.Hash()[:16]
	}
	return nil
}
