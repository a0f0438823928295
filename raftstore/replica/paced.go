package replica

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"
)

// A snapshot must not stand in the way of commits. Written as fast as it goes, a
// large one leaves hundreds of megabytes in the page cache, and whoever flushes a
// file of the same disk next, be it of one record, waits until they are written:
// half a second and more for a gigabyte. pacedSnapshots brings each stretch to
// the disk before it goes on, so that a flush of the journal never waits for
// more than two of them, and rests in between.
type pacedSnapshots struct {
	raft.SnapshotStore
	folder string // where a snapshot under way is found, by its id
	life   context.Context
}

const (
	// paceBytes is one stretch.
	paceBytes = 1 << 20
	// maxRest bounds the pause after a stretch, which else is as long as the
	// stretch took: half of the disk and of a processor are left to others.
	maxRest = 20 * time.Millisecond
)

func paceSnapshots(life context.Context, s raft.SnapshotStore, dataDir string) raft.SnapshotStore {
	return &pacedSnapshots{SnapshotStore: s, folder: filepath.Join(dataDir, "snapshots"), life: life}
}

// Create implements raft.SnapshotStore.
func (p *pacedSnapshots) Create(version raft.SnapshotVersion, index, term uint64, configuration raft.Configuration,
	configurationIndex uint64, trans raft.Transport) (raft.SnapshotSink, error) {
	sink, err := p.SnapshotStore.Create(version, index, term, configuration, configurationIndex, trans)
	if err != nil {
		return nil, err
	}
	s := &pacedSink{SnapshotSink: sink, life: p.life, began: time.Now()}
	// The sink does not show its file. Without it the rests alone must do.
	s.file, _ = os.Open(filepath.Join(p.folder, sink.ID()+snapshotSuffix+newSuffix))
	return s, nil
}

// pacedSink writes a snapshot stretch by stretch.
type pacedSink struct {
	raft.SnapshotSink
	life    context.Context
	file    *os.File // the same file once more; nil when not found
	written int64
	paced   int64 // of that, up to the end of the last whole stretch
	began   time.Time
}

// Write implements io.Writer. It fails when the replica stops, which need not
// wait for the end of a snapshot.
func (s *pacedSink) Write(b []byte) (int, error) {
	total := 0
	for len(b) > 0 {
		part := b[:min(int64(len(b)), s.paced+paceBytes-s.written)]
		n, err := s.SnapshotSink.Write(part)
		total += n
		s.written += int64(n)
		if err != nil {
			return total, err
		}
		b = b[len(part):]
		if s.written-s.paced < paceBytes {
			continue
		}
		if err := s.pace(); err != nil {
			return total, err
		}
	}
	return total, nil
}

// pace starts the writing of the stretch just filled, waits for the one before,
// and rests.
func (s *pacedSink) pace() error {
	if s.file != nil {
		// Only a hint to the kernel: what counts is the flush at the end.
		_ = unix.SyncFileRange(int(s.file.Fd()), s.paced, paceBytes, unix.SYNC_FILE_RANGE_WRITE)
		if before := s.paced - paceBytes; before >= 0 {
			_ = unix.SyncFileRange(int(s.file.Fd()), before, paceBytes,
				unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
		}
	}
	s.paced = s.written
	rest := time.NewTimer(min(maxRest, time.Since(s.began)))
	defer rest.Stop()
	select {
	case <-rest.C:
	case <-s.life.Done():
		return context.Cause(s.life)
	}
	s.began = time.Now()
	return nil
}

// Close implements raft.SnapshotSink.
func (s *pacedSink) Close() error {
	s.release()
	return s.SnapshotSink.Close()
}

// Cancel implements raft.SnapshotSink.
func (s *pacedSink) Cancel() error {
	s.release()
	return s.SnapshotSink.Cancel()
}

func (s *pacedSink) release() {
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}
