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
	// IdentityKey is the key of the store at which the IdentityRecord lies.
	IdentityKey     = api.StorageRoot + "keelson.dev/identity"
	IdentityVersion = 1
	// MaxAbandoned bounds the abandoned replicas that a record names.
	MaxAbandoned = 64
)

// RemovedMembersKey is the key of the store at which the list of removed members lies.
const RemovedMembersKey = api.StorageRoot + "keelson.dev/removed-members"

// Files of the data folder.
const (
	AbandonedFile = "abandoned.json" // on a replica whose cluster was recovered or restored without it
	// JoinedFile has the incarnation of the cluster that this replica joined. It counts until the
	// data has the record.
	JoinedFile = "joined-identity.json"
)

// IdentityRecord is what lies in the store. Later releases may add fields.
type IdentityRecord struct {
	Version     int    `json:"version"`
	Incarnation uint64 `json:"incarnation"`
	// Abandoned are the peer addresses of the replicas that were members before the recovery, by
	// name.
	Abandoned map[string]string `json:"abandoned,omitempty"`
}

// AbandonedRecord is what lies in the data folder of an abandoned replica (AbandonedFile).
type AbandonedRecord struct {
	Version     int    `json:"version"`
	Incarnation uint64 `json:"incarnation"` // of this replica's data
	Newest      uint64 `json:"newest"`      // the latest incarnation that it has seen
	From        string `json:"from"`        // the host from which it has that
	At          int64  `json:"atUnixMs"`
}

func DecodeIdentity(raw []byte) (rec IdentityRecord, err error) {
	if err := json.Unmarshal(raw, &rec); err != nil {
		return IdentityRecord{}, fmt.Errorf("the stored identity (%s): %w", IdentityKey, err)
	}
	return rec, nil
}

// ReadIdentity returns the identity record of a state, or the zero record if it is absent or unreadable.
func ReadIdentity(v *mvcc.View) IdentityRecord {
	it, ok := v.Get(IdentityKey)
	if !ok {
		return IdentityRecord{}
	}
	rec, _ := DecodeIdentity(it.Value)
	return rec
}

// AbandonedBy returns what this replica has written about the later incarnation that it found; nil
// when it found none.
func (d Dir) AbandonedBy() (*AbandonedRecord, error) {
	var rec AbandonedRecord
	found, err := ReadJSON(filepath.Join(d.Path, AbandonedFile), &rec)
	if err != nil || !found {
		return nil, err
	}
	return &rec, nil
}

// ClearAbandoned removes that record: the data of this replica is replaced.
func (d Dir) ClearAbandoned() error {
	if err := os.Remove(filepath.Join(d.Path, AbandonedFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
