package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk/journal"
	"keelson.dev/keelson/raftstore/mvcc"
)

// Info is the result of Inspect: a description of a replica's data.
type Info struct {
	Owner     string       // name of the replica; "" if the directory has no replica's data
	Cluster   string       // identity of the cluster, from the newest readable snapshot
	LogStore  LogStoreKind // "" if there is no log
	First     uint64       // index of the first log entry; 0 if the log is empty
	Last      uint64       // index of the last log entry
	LastTerm  uint64       // term of the last log entry; LastTerm and Last show which of several logs is newest
	Term      uint64       // current raft term
	Sealed    []string     // IDs of the key-encryption keys that are needed to read the data
	Bytes     int64        // size of all files
	Snapshots []SnapshotInfo
}

// SnapshotInfo describes a snapshot of a data directory. Snapshots are listed newest first.
type SnapshotInfo struct {
	File     string
	Index    uint64
	Term     uint64
	Bytes    int64 // size of the content
	Taken    time.Time
	Sealed   bool
	Revision raftstore.Revision // revision of the state; 0 if the snapshot cannot be decrypted
}

// ErrNoData is returned for a directory that does not contain a replica's data.
var ErrNoData = errors.New("raftstore: the directory has no replica's data")

// readStableRecord reads the stable store of a directory. It locks the directory while it reads,
// and waits for the lock for at most timeout.
func readStableRecord(dir string, timeout time.Duration) (stableRecord, error) {
	path := filepath.Join(dir, boltName)
	lock, err := lockDir(dir, timeout)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("%s: %w", dir, ErrNoData)
		}
		return stableRecord{}, err
	}
	defer lock.Close()
	b, err := checkBolt(path)
	if err != nil {
		return stableRecord{}, err
	}
	rec, err := decodeRecord(b)
	if err != nil {
		return rec, fmt.Errorf("%s: %w", path, err)
	}
	return rec, nil
}

// Inspect reads and verifies the data directory of a stopped replica. It needs c.Dir, and c.Keys
// for encrypted data. Damage is an error that names the file; the returned Info contains everything
// that could be read. As at a start of the replica, Inspect applies the records of a journal that a
// crash left. It makes no other change.
func Inspect(c Config) (Info, error) {
	var info Info
	rec, err := readStableRecord(c.Dir, 0)
	info.Bytes = dirBytes(c.Dir)
	if err != nil {
		return info, fmt.Errorf("inspecting %s: %w", c.Dir, err)
	}
	info.Owner, info.LogStore = rec.owner, rec.kind
	if v := rec.values["CurrentTerm"]; len(v) == 8 {
		info.Term = binary.BigEndian.Uint64(v)
	}
	c.Name, c.LogStore = rec.owner, rec.kind
	c = c.withDefaults()
	err = info.inspectFiles(c)
	if err != nil {
		return info, fmt.Errorf("inspecting %s: %w", c.Dir, err)
	}
	return info, nil
}

// inspectFiles adds the information from all files except raft.db to info. After an error in one
// file it continues with the other files, and returns the joined errors.
func (info *Info) inspectFiles(c Config) error {
	seals, err := openSealer(filepath.Join(c.Dir, dataKeysName), c.Keys)
	if err != nil {
		return err
	}
	info.Sealed = seals.wrappingKeyIDs()
	store := newSnapshotStore(c, seals, func(error) {})
	list, err := store.readHeaders()
	if errors.Is(err, fs.ErrNotExist) {
		list, err = nil, nil
	}
	for i, k := range list {
		one := SnapshotInfo{
			File: store.filePath(k.id), Index: k.Index, Term: k.Term, Bytes: k.size,
			Taken: time.UnixMilli(k.Taken), Sealed: k.Key != 0,
		}
		cluster, revision, lookErr := store.describeSnapshot(k.id)
		if lookErr != nil && !errors.Is(lookErr, ErrSealed) {
			err = errors.Join(err, lookErr)
		}
		if one.Revision = revision; i == 0 {
			info.Cluster = cluster
		}
		info.Snapshots = append(info.Snapshots, one)
	}
	d, openErr := openDisk(c, func(error) {})
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	defer d.Close()
	var e error
	if info.First, e = d.Log.FirstIndex(); e == nil {
		info.Last, e = d.Log.LastIndex()
	}
	if e == nil && info.Last > 0 {
		var last raft.Log
		e = d.Log.GetLog(info.Last, &last)
		info.LastTerm = last.Term
	}
	return errors.Join(err, e)
}

// describeSnapshot reads and verifies a whole snapshot. It returns the identity of the cluster and
// the revision of the state.
func (s *snapshotStore) describeSnapshot(id string) (string, raftstore.Revision, error) {
	_, content, err := s.Open(id)
	if err != nil {
		return "", 0, err
	}
	defer content.Close()
	machine, meta, err := mvcc.Load(content)
	if err != nil {
		return "", 0, s.corruptError(id, err)
	}
	return meta.Cluster, machine.View().Revision(), nil
}

// dirBytes returns the sum of the sizes of all files in a directory, in bytes.
func dirBytes(dir string) int64 {
	total := int64(0)
	// Unreadable files are omitted: the size is only displayed.
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			total += info.Size()
		}
		return nil
	})
	return total
}

// isReplicaFile reports whether a replica creates files with this name in its data directory.
func isReplicaFile(name string) bool {
	for _, n := range append([]string{boltName, walName, dataKeysName, snapshotsName, stagingName}, journalNames()...) {
		if name == n || name == n+durable.TempSuffix {
			return true
		}
	}
	return false
}

// SetAside moves the data of a stopped replica to a new directory beside c.Dir, and returns the
// path of the new directory. Afterwards the replica can join again as an empty replica, or be
// restored. SetAside does not read the data, so it also moves damaged data. It needs only c.Dir.
//
// The data must not be moved back after the replica has joined again: the votes that it has cast
// since then would be lost.
func SetAside(c Config) (moved string, err error) {
	lock, err := lockDir(c.Dir, 0)
	if err == nil {
		defer lock.Close()
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("setting aside %s: %w", c.Dir, err)
	}
	list, err := os.ReadDir(c.Dir)
	if err != nil {
		return "", fmt.Errorf("setting aside: %w", err)
	}
	list = slices.DeleteFunc(list, func(e fs.DirEntry) bool { return !isReplicaFile(e.Name()) })
	if len(list) == 0 {
		return "", fmt.Errorf("setting aside %s: %w", c.Dir, ErrNoData)
	}
	// raft.db is moved first. If SetAside is interrupted, the replica cannot start with the rest,
	// and the next attempt moves the rest.
	slices.SortFunc(list, func(a, b fs.DirEntry) int {
		switch {
		case a.Name() == boltName:
			return -1
		case b.Name() == boltName:
			return 1
		}
		return 0
	})
	moved = fmt.Sprintf("%s.aside-%s", filepath.Clean(c.Dir), time.Now().UTC().Format("20060102T150405.000000000"))
	if err := os.Mkdir(moved, 0o700); err != nil {
		return "", fmt.Errorf("setting aside: %w", err)
	}
	for _, e := range list {
		if err := os.Rename(filepath.Join(c.Dir, e.Name()), filepath.Join(moved, e.Name())); err != nil {
			return moved, fmt.Errorf("setting aside: %w", err)
		}
	}
	return moved, errors.Join(durable.Sync(moved), durable.Sync(c.Dir), durable.Sync(filepath.Dir(moved)))
}

func journalNames() []string {
	names := journal.Names(journalName)
	return names[:]
}
