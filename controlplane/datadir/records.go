package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore/mvcc"
)

const (
	// IdentityKey is the key of the IdentityRecord in the store.
	IdentityKey     = api.StorageRoot + "keelson.dev/identity"
	IdentityVersion = 1
	// MaxAbandoned is the maximum number of replicas in IdentityRecord.Abandoned.
	MaxAbandoned = 64
)

// RemovedMembersKey is the key of the list of removed members in the store.
const RemovedMembersKey = api.StorageRoot + "keelson.dev/removed-members"

// Names of files in the data directory.
const (
	AbandonedFile = "abandoned.json" // exists on an abandoned replica: its cluster was recovered or restored without it
	// JoinedFile contains the incarnation of the cluster that this replica has joined. It is used
	// until the IdentityRecord has been replicated to this replica's store.
	JoinedFile = "joined-identity.json"
)

// IdentityRecord is the stored identity of the cluster. Each recovery or restore starts a new
// incarnation of the cluster with a higher number. By this number, replicas with data of a previous
// incarnation are detected. Later releases may add fields.
type IdentityRecord struct {
	Version     int    `json:"version"`
	Incarnation uint64 `json:"incarnation"`
	// Abandoned contains the replicas that were members before a recovery or restore, and are no
	// longer members since: their peer addresses by their names.
	Abandoned map[string]string `json:"abandoned,omitempty"`
}

// AbandonedRecord is the content of AbandonedFile, in the data directory of an abandoned replica.
type AbandonedRecord struct {
	Version     int    `json:"version"`
	Incarnation uint64 `json:"incarnation"` // incarnation of this replica's data
	Newest      uint64 `json:"newest"`      // the highest incarnation that this replica has observed
	From        string `json:"from"`        // the host that reported Newest
	At          int64  `json:"atUnixMs"`
}

func DecodeIdentity(raw []byte) (rec IdentityRecord, err error) {
	if err := json.Unmarshal(raw, &rec); err != nil {
		return IdentityRecord{}, fmt.Errorf("the stored identity (%s): %w", IdentityKey, err)
	}
	return rec, nil
}

// ReadIdentity returns the identity record in the state v of a store. It returns the zero value if
// the record is missing or cannot be decoded.
func ReadIdentity(v *mvcc.View) IdentityRecord {
	it, ok := v.Get(IdentityKey)
	if !ok {
		return IdentityRecord{}
	}
	rec, _ := DecodeIdentity(it.Value)
	return rec
}

// AbandonedBy returns the content of AbandonedFile: the later incarnation of the cluster, which
// this replica is not part of. It returns nil if this replica is not abandoned.
func (d Dir) AbandonedBy() (*AbandonedRecord, error) {
	var rec AbandonedRecord
	found, err := ReadJSON(filepath.Join(d.Path, AbandonedFile), &rec)
	if err != nil || !found {
		return nil, err
	}
	return &rec, nil
}

// ClearAbandoned removes AbandonedFile, so that this replica is no longer considered abandoned. Its
// data must be about to be replaced.
func (d Dir) ClearAbandoned() error {
	if err := os.Remove(filepath.Join(d.Path, AbandonedFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
