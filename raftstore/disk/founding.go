package disk

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// Open opens the data directory of a replica that is to run, and makes
// it when none exists. Nothing is built on what a power cut could take away.
// fail is called, once, with the first error after which the replica must stop.
func Open(c Config, fail func(error)) (*Data, error) {
	c = c.withDefaults()
	if c.NoSync {
		return openDisk(c, fail)
	}
	if err := platter.Settle(c.Dir, neverInPart); err != nil {
		return nil, fmt.Errorf("disk of replica %s: %w", c.Name, err)
	}
	d, err := openDisk(c, fail)
	if err != nil {
		return nil, err
	}
	// What was made in it now.
	if err := platter.SyncFolder(c.Dir); err != nil {
		d.Close()
		return nil, fmt.Errorf("disk of replica %s: %w", c.Name, err)
	}
	return d, nil
}

// neverInPart says of a file that it has its name only when it is on the disk, or
// is not read.
func neverInPart(path string) bool {
	return strings.HasSuffix(path, snapshotSuffix) || strings.HasSuffix(path, platter.NewSuffix)
}

// StartOver lets a founding be done again that a crash cut short. raft writes
// its first term before the configuration of the group; with a term and
// without a configuration it would wait for ever to be called by a leader.
// Whoever has voted or heard of a leader has a later term.
func (d *Data) StartOver() error {
	last, err := d.Log.LastIndex()
	if err != nil || last != 0 {
		return err
	}
	list, err := d.Snapshots.List()
	if err != nil || len(list) != 0 {
		return err
	}
	values := d.stable.record().values
	if term, err := d.stable.GetUint64(keyTerm); err != nil || term != 1 || len(values[keyVoteTerm]) != 0 {
		return nil
	}
	if err := d.stable.SetUint64(keyTerm, 0); err != nil {
		return fmt.Errorf("founding the group again: %w", err)
	}
	return nil
}

// Keys that raft uses in the stable store.
const keyVoteTerm = "LastVoteTerm"

var keyTerm = []byte("CurrentTerm")

// KeyGroup is the key of the group's identity in the stable store.
var KeyGroup = []byte("keelson.dev/group")

// Found gives the data a group of its own, and returns its identity.
func (d *Data) Found() (string, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", fmt.Errorf("making an identity for the group: %w", err)
	}
	id := hex.EncodeToString(b[:])
	if err := d.stable.Set(KeyGroup, []byte(id)); err != nil {
		return "", fmt.Errorf("writing the identity of the group: %w", err)
	}
	return id, nil
}
