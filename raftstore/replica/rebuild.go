package replica

import (
	"errors"
	"time"

	"keelson.dev/keelson/raftstore"
)

// DiskInfo is what Inspect finds in a data directory.
type DiskInfo struct {
	Owner     string       // name of the replica; "" when the directory holds none
	Cluster   string       // of the newest snapshot
	LogStore  LogStoreKind // "" when there is no log
	First     uint64       // index of the first entry of the log; 0 = the log is empty
	Last      uint64       // and of the last
	Term      uint64       // current raft term
	Sealed    []string     // ids of the key-encryption keys that it needs
	Bytes     int64        // on the disk, of all files
	Snapshots []SnapshotInfo
}

// SnapshotInfo is one snapshot of a data directory, newest first.
type SnapshotInfo struct {
	File     string
	Index    uint64
	Term     uint64
	Bytes    int64 // of its content
	Taken    time.Time
	Sealed   bool
	Revision raftstore.Revision // 0 when it is sealed
}

// Inspect looks into a data directory that no replica uses, and changes
// nothing. It needs c.DataDir only. What it finds damaged is an error that
// names the file, together with what could be read.
func Inspect(c Config) (DiskInfo, error) { return DiskInfo{}, errors.ErrUnsupported }

// SetAside moves the raft data of a replica that does not run out of the way,
// so that it can join again empty or be restored. It returns where the data is
// now: a directory beside c.DataDir.
func SetAside(c Config) (moved string, err error) { return "", errors.ErrUnsupported }
