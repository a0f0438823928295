package disk

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"

	"keelson.dev/keelson/internal/durable"
)

// Open opens the data directory of a replica, and creates it if it does not exist. All data that is
// read from it is durable. fail is called once, with the first error after which the replica must
// stop.
func Open(c Config, fail func(error)) (*Data, error) {
	c = c.withDefaults()
	if c.NoSync {
		return openDisk(c, fail)
	}
	if err := settleTree(c.Dir, isSyncedBeforeNamed); err != nil {
		return nil, fmt.Errorf("disk of replica %s: %w", c.Name, err)
	}
	d, err := openDisk(c, fail)
	if err != nil {
		return nil, err
	}
	// make the directory entries of the files durable that were created above
	if err := durable.Sync(c.Dir); err != nil {
		d.Close()
		return nil, fmt.Errorf("disk of replica %s: %w", c.Name, err)
	}
	return d, nil
}

// isSyncedBeforeNamed reports whether a file need not be synced when the data directory is opened.
// Either it was synced before it got its name, or its content is never read.
func isSyncedBeforeNamed(path string) bool {
	return strings.HasSuffix(path, snapshotSuffix) || strings.HasSuffix(path, durable.TempSuffix)
}

// ResetInterruptedBootstrap undoes the bootstrap of a raft cluster that a crash interrupted, so
// that the caller can bootstrap the cluster again. raft writes its first term before the
// configuration of the cluster. With a term and without a configuration, it would wait for a leader
// forever. A replica that has voted or has seen a leader has a later term, and is not changed.
func (d *Data) ResetInterruptedBootstrap() error {
	last, err := d.Log.LastIndex()
	if err != nil || last != 0 {
		return err
	}
	list, err := d.Snapshots.List()
	if err != nil || len(list) != 0 {
		return err
	}
	values := d.stable.currentRecord().values
	if term, err := d.stable.GetUint64(keyTerm); err != nil || term != 1 || len(values[keyVoteTerm]) != 0 {
		return nil
	}
	if err := d.stable.SetUint64(keyTerm, 0); err != nil {
		return fmt.Errorf("resetting an interrupted founding of the raft cluster: %w", err)
	}
	return nil
}

// keyVoteTerm is raft's key for the term of its last vote.
const keyVoteTerm = "LastVoteTerm"

var keyTerm = []byte("CurrentTerm")

// KeyRaftClusterID is the key of the raft cluster's ID in the stable store.
var KeyRaftClusterID = []byte("keelson.dev/group")

// CreateRaftClusterID stores the random ID of a new raft cluster in the data directory, and returns
// the ID.
func (d *Data) CreateRaftClusterID() (string, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", fmt.Errorf("creating an identity for the raft cluster: %w", err)
	}
	id := hex.EncodeToString(b[:])
	if err := d.stable.Set(KeyRaftClusterID, []byte(id)); err != nil {
		return "", fmt.Errorf("writing the identity of the raft cluster: %w", err)
	}
	return id, nil
}
