package replica

import (
	"context"
	"errors"
)

// LogStoreKind names what keeps the raft log on disk.
type LogStoreKind string

const (
	LogBolt LogStoreKind = "bolt" // raft-boltdb, behind a journal of our own
	LogWAL  LogStoreKind = "wal"  // raft-wal
)

// ErrLogStore reports a data directory made with another log store than the
// configured one.
var ErrLogStore = errors.New("raftstore: data directory has another log store")

// Convert changes the log store of a replica that does not run. A crash leaves
// the old log or the new one, never half of one. progress, which may be nil, is
// told of entries done and their total.
func Convert(ctx context.Context, c Config, to LogStoreKind, progress func(done, total uint64)) error {
	return errors.ErrUnsupported
}
